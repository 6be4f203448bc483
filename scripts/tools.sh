# shellcheck shell=sh
# To be sourced: finds the tools that a script needs, and installs what apt has where that is allowed.

# need COMMAND PACKAGE...: COMMAND is there afterwards, or the script ends with a message.
need() {
    want "$@" && return
    wanted=$1
    shift
    echo "$0: $wanted is needed; install it (on Debian and Ubuntu: apt-get install $*)" >&2
    exit 1
}

# want COMMAND PACKAGE...: whether COMMAND is there, installed where that is possible.
want() {
    wanted=$1
    shift
    command -v "$wanted" >/dev/null 2>&1 && return
    try_apt "$@"
    command -v "$wanted" >/dev/null 2>&1
}

# want_python MODULE PACKAGE: whether the system's Python has a module, installed where that is possible.
want_python() {
    /usr/bin/python3 -c "import $1" 2>/dev/null && return
    try_apt "$2"
    /usr/bin/python3 -c "import $1" 2>/dev/null
}

try_apt() {
    if command -v apt-get >/dev/null 2>&1; then
        if [ "$(id -u)" = 0 ]; then
            apt_install "$@" || true
        elif command -v sudo >/dev/null 2>&1; then
            as_root=sudo apt_install "$@" || true
        fi
    fi
}

apt_install() {
    echo "$0: installing $*" >&2
    ${as_root:-} env DEBIAN_FRONTEND=noninteractive apt-get -qq update &&
        ${as_root:-} env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "$@" >/dev/null
}

# cargo, and the C compiler it links with.
need_cargo() {
    need cc gcc libc6-dev
    PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin
    if ! command -v cargo >/dev/null 2>&1; then
        echo "$0: cargo is needed, 1.88 or later; rustup installs it: https://rustup.rs" >&2
        exit 1
    fi
}
