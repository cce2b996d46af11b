"""`python -m weightstream` is the command `weightstream`."""

from weightstream.cli import app

app(prog_name="weightstream")
