"""The exact arm: an hourly job that rebuilds an hour from its cut and publishes it once it is
proven."""
