"""`python -m anabranch.dev.demo`."""

from anabranch.dev.demo import command

command()
