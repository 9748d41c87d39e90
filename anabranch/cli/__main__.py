"""`python -m anabranch.cli`."""

from anabranch.cli import run

run()
