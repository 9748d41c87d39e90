"""Completion of commands, options and streams by a shell."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    It completes commands, options and the names of streams. Once and for all, in bash: `anabranch
    completion bash > ~/.local/share/bash-completion/completions/anabranch`; for a session: `eval
    "$(anabranch completion bash)"`. In zsh: into a file `_anabranch` in a folder of `fpath`, before
    `compinit`. In fish: into `~/.config/fish/completions/anabranch.fish`.
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    root = context.find_root()
    click.echo(made(root.command, {}, "anabranch", "_ANABRANCH_COMPLETE").source())
