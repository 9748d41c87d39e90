"""Import of hours from files of another system (`anabranch import`)."""
