"""What operators look at and run: reports, doctor, audit, maintenance, the status page,
notifications."""
