"""What operators use: reports, doctor, audit and status page."""
