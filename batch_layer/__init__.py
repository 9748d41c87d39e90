"""The exact arm: an hourly job that rebuilds an hour from its cut, proves it and publishes it."""
