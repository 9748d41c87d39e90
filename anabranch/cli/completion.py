"""Shell completion of commands, options and streams."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    It completes commands, options and the names of streams. To install it in bash: `anabranch
    completion bash > ~/.local/share/bash-completion/completions/anabranch`; for one session: `eval
    "$(anabranch completion bash)"`. In zsh, write it to a file `_anabranch` in a folder of `fpath`,
    before `compinit`. In fish, write it to `~/.config/fish/completions/anabranch.fish`.
    """
    from click.shell_completion import get_completion_class

    completion_class = get_completion_class(shell)
    assert completion_class is not None
    root = context.find_root()
    click.echo(completion_class(root.command, {}, "anabranch", "_ANABRANCH_COMPLETE").source())
