"""What operators look at: reports, doctor, audit, the status page."""
