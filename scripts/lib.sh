# What every script here shares: messages, packages, apt, temporary places.
# Sourced, not run. The caller has `set -euo pipefail`.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PROGRAM=$(basename "$0")
# Kernels, guest programs and initramfs images: fetched or built once, safe to delete.
CACHE=${VZRAM_GUEST_CACHE:-$ROOT/target/guest}

# Debian puts these outside a plain user's PATH; rustup installs for the user only.
PATH=$PATH:/usr/sbin:/sbin:${HOME:-/root}/.cargo/bin

say() { printf '%s\n' "$*" >&2; }

die() {
    say "$PROGRAM: $*"
    exit 1
}

usage_error() {
    say "$PROGRAM: $*; see $PROGRAM --help"
    exit 2
}

# The comment at a script's head is its help text, so that there is only one of them.
print_help() { sed -n '2,/^$/{s/^# \{0,1\}//;p}' "$0"; }

has() { command -v "$1" >/dev/null 2>&1; }

is_count() { [[ $1 =~ ^[1-9][0-9]{0,5}$ ]]; }

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif has sudo; then
        sudo "$@"
    else
        die "must be root (or have sudo) to run: $*"
    fi
}

# Prints the packages whose file or command is not there; arguments are COMMAND-OR-PATH:PACKAGE.
missing_packages() {
    local pair
    for pair; do
        [ -e "${pair%%:*}" ] || has "${pair%%:*}" || printf '%s\n' "${pair#*:}"
    done | sort -u
}

# Where this machine fetches Debian from, whatever form its source lists have.
debian_mirror() {
    local codename mirror
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    mirror=$(apt-get indextargets --format "\$(REPO_URI) \$(RELEASE) \$(COMPONENT)" 'Created-By: Packages' |
        awk -v codename="$codename" '$2 == codename && $3 == "main" { print $1; exit }')
    [ -n "$mirror" ] || die "found no apt source for Debian ${codename:-(unknown release)} main on this machine"
    echo "$mirror"
}

# Sets APT_OPTIONS to package lists of our own with the given suites, taken from the mirror that this machine
# uses anyhow. The machine's own source lists stay as they are, and looking something up needs no root.
use_suites() {
    local directory=$CACHE/apt/$1 mirror
    mirror=$(debian_mirror)
    mkdir -p "$directory/sources" "$directory/lists/partial"
    cat >"$directory/sources/suites.sources" <<EOF
Types: deb
URIs: $mirror
Suites: $*
Components: main
Targets: Packages
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
EOF
    # No package cache files: root and the user would overwrite each other's. The sandbox user of apt could not
    # reach a cache below a home directory.
    APT_OPTIONS=(
        -o "Dir::Etc::SourceList=/dev/null" -o "Dir::Etc::SourceParts=$directory/sources"
        -o "Dir::State::Lists=$directory/lists" -o "Dir::Cache::pkgcache=" -o "Dir::Cache::srcpkgcache="
        -o "APT::Sandbox::User=root"
    )
    apt-get -qq "${APT_OPTIONS[@]}" update >&2 || die "apt could not fetch the package lists of: $*"
}

# `make_once TARGET COMMAND...` runs COMMAND with a temporary path as its last argument. TARGET is there complete or
# not at all, whenever the run that makes it is stopped.
make_once() {
    local target=$1 new=$1.new.$$
    shift
    [ ! -e "$target" ] || return 0
    mkdir -p "$(dirname "$target")"
    # A subshell and no `if`: a failing step of COMMAND must end it, which bash forgets to do inside a condition.
    (
        trap 'rm -rf "$new"' EXIT
        "$@" "$new"
        # Somebody else may have made it meanwhile: theirs is as good.
        [ -e "$target" ] || mv "$new" "$target"
    )
}
