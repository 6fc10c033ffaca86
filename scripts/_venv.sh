# Sourced by the other scripts: goes to the top of the repository and offers `install EXTRAS`.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv_python=.venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1

# Make .venv if there is none, and bring this project and its EXTRAS (comma-separated) into it at the versions of
# constraints.txt. Quick when nothing changed. A .venv that you made yourself keeps the torch that is in it.
install() {
  local extras=$1 stamp=.venv/.tlk-installed-$1 pins=.venv/.tlk-pins.txt wanted
  if [ ! -x "$venv_python" ]; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
      { echo "Python 3.11 or newer is needed: PYTHON=/path/to/python3.11 $0" >&2; exit 2; }
    "${PYTHON:-python3}" -m venv .venv
    touch .venv/.tlk-made-here
  fi
  wanted=$(cat pyproject.toml constraints.txt scripts/_venv.sh | sha256sum)
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return; fi
  echo "Installing tlk-tracking[$extras] into .venv (the first time takes some minutes) ..."
  cp constraints.txt "$pins"
  if [ ! -f .venv/.tlk-made-here ] && "$venv_python" -c 'import importlib.metadata as m; m.version("torch")' 2> /dev/null; then
    # Another torch wants another triton, and until 2.12 an older setuptools.
    { grep -vE '^(torch|triton|setuptools)==' constraints.txt && echo 'setuptools<82'; } > "$pins"
  fi
  # The build uses the setuptools installed here: pip's own isolated build would fetch an unpinned one.
  "$venv_python" -m pip install -qq -c "$pins" pip 'setuptools>=77'
  "$venv_python" -m pip install -qq -c "$pins" --no-build-isolation -e ".[$extras]"
  echo "$wanted" > "$stamp"
}
