#!/usr/bin/env bash
# Gives pretrain_gpt.py of a Megatron-LM checkout the options --twinkle-loss, --twinkle-metrics, ... (docs/megatron-lm.md).
#
# usage: patches/apply.sh CHECKOUT              of Megatron-LM core_r0.16, core_r0.17, core_r0.18 or core_r0.19
#        patches/apply.sh --revert CHECKOUT     takes them away again
#
# The file is known by its SHA-256 (patches/megatron-lm/known.txt). One that is not known is left alone: exit code 1. One that is
# as wanted already is left alone, too: exit code 0. The file is replaced as a whole, or not at all.
set -euo pipefail

patches=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/megatron-lm
revert=''

fail() {
    echo "$0: error: $1" >&2
    exit "${2:-1}"
}

usage() { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

case ${1:-} in
    -h | --help) usage; exit 0 ;;
    --revert) revert=1; shift ;;
esac
[ $# -eq 1 ] || { usage >&2; exit 2; }
case $1 in -*) fail "there is no option $1; see --help" 2 ;; esac
file=$1/pretrain_gpt.py
[ -f "$file" ] || fail "there is no $file; the argument is the folder of a Megatron-LM checkout"
command -v patch >/dev/null || fail 'the program patch is missing; on Debian or Ubuntu: apt-get install patch'

hash_of() { sha256sum "$1" | cut -d' ' -f1; }

found=$(hash_of "$file")
while read -r name plain patched; do
    case $name in '' | '#'*) continue ;; esac
    if [ -n "$revert" ]; then from=$patched to=$plain; else from=$plain to=$patched; fi
    if [ "$found" = "$to" ]; then
        echo "$file is ${revert:+un}patched already: nothing to do"
        exit 0
    fi
    [ "$found" = "$from" ] || continue
    new=$(mktemp "$file.XXXXXX")
    trap 'rm -f "$new"' EXIT
    patch --quiet ${revert:+--reverse} --output="$new" "$file" "$patches/$name" || fail "$name does not fit $file"
    [ "$(hash_of "$new")" = "$to" ] || fail "$name gave another file than expected; $file was left as it is"
    chmod --reference="$file" "$new"
    mv "$new" "$file"
    echo "$file: ${name%.patch} ${revert:+un}patched"
    exit 0
done <"$patches/known.txt"

fail "$file is not one that this knows (SHA-256 $found); it was left as it is.
Known are those of the releases $(sed -n 's/^\(core_r[0-9.]*\)\.patch .*/\1/p' "$patches/known.txt" | tr '\n' ' ')of Megatron-LM. Any other script is trained without a change:
    torchrun ... -m twinkle_megatron.run --loss chunked_cross_entropy -- $file ..."
