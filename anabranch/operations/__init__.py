"""The tools of operators: reports, doctor, audit and status page."""
