"""Scripts that complete commands, options and topics in bash, zsh and fish, and where they are installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from nsqext.errors import InvalidSetting

# each asks the program by typer's protocol for fish: a line for each completion, with a description behind a
# tab, or an empty line
_BASH = """\
_nsqext_completion() {
    local line
    COMPREPLY=()
    # COMP_LINE, because COMP_WORDS has 127.0.0.1:4161 as three words
    while IFS= read -r line; do
        if [[ -n $line ]]; then COMPREPLY+=("${line%%$'\\t'*}"); fi
    done < <(_NSQEXT_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \\
        _TYPER_COMPLETE_ARGS="${COMP_LINE:0:COMP_POINT}" nsqext 2>/dev/null)
}
complete -o default -F _nsqext_completion nsqext
"""
_ZSH = """\
#compdef nsqext
_nsqext() {
    local line
    local -a found
    for line in ${(f)"$(_NSQEXT_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \\
        _TYPER_COMPLETE_ARGS="${(j: :)words[1,CURRENT-1]} $PREFIX" nsqext 2>/dev/null)"}; do
        if [[ $line == *$'\\t'* ]]; then
            found+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
        else
            found+=("${line//:/\\\\:}")
        fi
    done
    if (( $#found )); then _describe -V nsqext found; else _files; fi
}
# the first completion of a shell loads this file, and has to be answered too
if [[ ${funcstack[1]} == _nsqext ]]; then _nsqext "$@"; else compdef _nsqext nsqext; fi
"""
_FISH = """\
function __nsqext_complete
    set -l found (env _NSQEXT_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \\
        _TYPER_COMPLETE_ARGS=(commandline -cp) nsqext 2>/dev/null | string match --regex '.+')
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete --command nsqext --no-files --arguments "(__nsqext_complete)"
"""


def _home(variable: str, default: str) -> Path:
    """Return the folder that a variable names, or one below the home folder."""
    return Path(os.environ.get(variable) or Path.home() / default)


@frozen
class _Shell:
    script: str
    file: Callable[[], Path]  #: where the script is installed
    settings: Callable[[], Path] | None = None  #: the file that the shell reads at its start
    line: str = ""  #: what it has to contain


_SHELLS = {
    "bash": _Shell(
        _BASH,
        lambda: Path.home() / ".bash_completions" / "nsqext.sh",
        lambda: Path.home() / ".bashrc",
        "source ~/.bash_completions/nsqext.sh",
    ),
    "zsh": _Shell(
        _ZSH,
        lambda: _home("ZDOTDIR", "") / ".zfunc" / "_nsqext",
        lambda: _home("ZDOTDIR", "") / ".zshrc",
        "fpath+=${ZDOTDIR:-$HOME}/.zfunc; autoload -Uz compinit; compinit",
    ),
    "fish": _Shell(_FISH, lambda: _home("XDG_CONFIG_HOME", ".config") / "fish" / "completions" / "nsqext.fish"),
}


def running_shell() -> str:
    """Return the shell that started this program.

    Raises:
        InvalidSetting: it has no completion.
    """
    import shellingham

    try:
        name = str(shellingham.detect_shell()[0])
    except shellingham.ShellDetectionFailure:
        name = Path(os.environ.get("SHELL", "")).name or "none"
    if name not in _SHELLS:
        raise InvalidSetting(
            f"the shell is {name}, and completion is made for {', '.join(_SHELLS)}", hint="start one of these shells"
        )
    return name


def completion_script(shell: str) -> str:
    """Return the script of a shell."""
    return _SHELLS[shell].script


def install_completion(shell: str) -> Path:
    """Write the script of a shell, make the shell read it, and return its path.

    Raises:
        OSError: a file cannot be written.
    """
    known = _SHELLS[shell]
    path = known.file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(known.script, encoding="utf-8")
    if known.settings is not None:
        settings = known.settings()
        content = settings.read_bytes() if settings.is_file() else b""
        if known.line.encode() not in content.splitlines():
            end = b"" if not content or content.endswith(b"\n") else b"\n"
            with settings.open("ab") as file:  # a full disk leaves what it has
                file.write(b"%b%b\n" % (end, known.line.encode()))
    return path
