#!/usr/bin/env bash
# Installs the project in steps: the image makes a layer of each, everyone else runs all of them.
#
#   scripts/install.sh [torch] [dependencies] [project]
#
# PYTHON       the interpreter to install into                              (python)
# EXTRAS       extras of the project, such as test,tensorboard              (none)
# EDITABLE     1: the project is run from this folder                       (a copy is installed)
# TORCH        the release of torch                                         (the one in constraints.txt)
# TORCH_INDEX  its index, such as https://download.pytorch.org/whl/cu126    (pip's)
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python}
extras=${EXTRAS:-}
torch=${TORCH:-$(grep '^torch==' scripts/constraints.txt)}
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
grep -v '^torch==' scripts/constraints.txt > "$constraints"

install() {
    "$python" -m pip install --quiet --constraint "$constraints" "$@"
}

# First and by itself, so that its release is the one asked for and not the newest that fits.
install_torch() {
    install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
}

# What pyproject.toml names, so that a change of the project's own files installs none of it again.
install_dependencies() {
    local wanted
    wanted=$("$python" - "$extras" << 'END'
import sys
try:
    import tomllib
except ImportError:  # Python 3.10: the project brings them
    sys.exit()
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = [extra for extra in sys.argv[1].split(",") if extra]
print(*project["dependencies"], *(d for extra in extras for d in project["optional-dependencies"][extra]), sep="\n")
END
    )
    if [ -n "$wanted" ]; then
        install --requirement /dev/stdin <<< "$wanted"
    fi
}

install_project() {
    install ${EDITABLE:+--editable} ".${extras:+[$extras]}"
    "$python" -m pip check
}

for step in "${@:-all}"; do
    case $step in
        torch | dependencies | project) "install_$step" ;;
        all)
            install_torch
            install_dependencies
            install_project
            ;;
        *)
            echo "scripts/install.sh: there is no step '$step': torch, dependencies, project" >&2
            exit 2
            ;;
    esac
done
