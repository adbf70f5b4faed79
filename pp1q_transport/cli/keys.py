"""`pp1q keys`: make CURVE keys, look at them, and keep allow-lists.

Between the operator and `pp1q_transport.keys`, which does the work. Never prints a secret. SPEC section 9.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import click

from .. import keys as key_files
from ._common import command_errors

_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object for machines instead of text.")


class _Group(click.Group):
    """A group whose `ConfigError`s are one line and exit status 2, as every command's."""

    def invoke(self, ctx: click.Context) -> object:
        """Runs the sub-command."""
        return command_errors(super().invoke)(ctx)


def _say(as_json: bool, values: Mapping[str, object], text: str) -> None:
    click.echo(json.dumps(values) if as_json else text)


@click.group("keys", cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def keys() -> None:
    """CURVE keys of the control plane, and the allow-lists that say who may connect.

    \b
    Example, a listener and one client:
      pp1q keys new receiver --dir keys
      pp1q keys new leader --dir keys
      pp1q keys allow keys/allowed keys/leader.public
    """


@keys.command("new")
@click.argument("name")
@click.option("--dir", "directory", default=".", show_default=True, help="Where NAME.secret and NAME.public go.")
@_JSON
def new(name: str, directory: str, as_json: bool) -> None:
    """Makes a key pair: NAME.secret (mode 0600, stays here) and NAME.public (for the other side).

    \b
    Example: pp1q keys new leader --dir keys
    """
    pair, secret_path, public_path = key_files.generate(directory, name)
    values = {"name": name, "public": pair.public, "secret_file": str(secret_path), "public_file": str(public_path)}
    text = f"{pair.public}\nsecret: {secret_path} (keep it here)\npublic: {public_path} (give it to the other side)"
    _say(as_json, values, text)


@keys.command("show")
@click.argument("file")
@_JSON
def show(file: str, as_json: bool) -> None:
    """Prints the public key of a .public or .secret file, after checking the file; never the secret.

    \b
    Example: pp1q keys show keys/leader.secret
    """
    secret = file.endswith(key_files.SECRET_SUFFIX)
    public = key_files.load_secret(file).public if secret else key_files.load_public(file)
    _say(as_json, {"file": file, "public": public, "holds_secret": secret}, public)


@keys.command("allow")
@click.argument("allow_list")
@click.argument("key")
@click.option("--comment", default="", help="Who that is; the file's name if KEY is a file.")
@_JSON
def allow(allow_list: str, key: str, comment: str, as_json: bool) -> None:
    """Adds KEY (a public key or a .public file) to ALLOW_LIST, making the list if there is none.

    \b
    Example: pp1q keys allow keys/allowed keys/leader.public --comment "draft host"
    """
    public = key_files.public_key(key)
    if not comment and public != key:
        comment = key.rsplit("/", 1)[-1].removesuffix(key_files.PUBLIC_SUFFIX)
    added = key_files.allow(allow_list, public, comment)
    values = {"allow_list": allow_list, "public": public, "added": added}
    _say(as_json, values, f"{'allowed' if added else 'was allowed already'}: {public}")


@keys.command("list")
@click.argument("allow_list")
@_JSON
def list_allowed(allow_list: str, as_json: bool) -> None:
    """Prints the keys on ALLOW_LIST, after checking every line.

    \b
    Example: pp1q keys list keys/allowed
    """
    allowed = key_files.load_allow_comments(allow_list)
    rows = [{"public": public, "comment": comment} for public, comment in allowed.items()]
    text = "\n".join(f"{row['public']}  {row['comment']}".rstrip() for row in rows) or "(nobody)"
    _say(as_json, {"allow_list": allow_list, "keys": rows}, text)
