#!/bin/sh
# Print the requirements of packages of a locked file, with their hashes: sh scripts/locked.sh FILE NAME...
set -eu
file=$1
shift
for name; do
    # From the package's line to the first one that no backslash continues. Pythons may differ in the release.
    sed -n "/^$name==/,/[^\\\\]\$/p" "$file" | grep .
done
