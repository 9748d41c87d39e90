"""Import: hours whose rows come from files of another system (`anabranch import`)."""
