"""The difference between the layers' rows of an hour: its kinds, and the two engines that compute
it."""
