"""What differs between the layers' rows of an hour: the kinds, and the two engines that find them."""
