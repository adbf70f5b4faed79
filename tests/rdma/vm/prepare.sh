#!/usr/bin/env bash
# prepare.sh CACHE: what a machine for RDMA without RDMA hardware is made of: qemu, verbs and their tools (Debian packages, when missing),
# and Debian's newest 6.12 kernel, which has Soft-RoCE, unpacked under CACHE by its version. Prints that kernel's folder.
# Status 3: it can't be had here, and stderr's last line says why.
set -euo pipefail
cache=$1
mkdir -p "$cache"
cannot() { echo "$1" >&2; exit 3; }
[ "$(uname -m)" = x86_64 ] || cannot "the machine is built for x86_64 only, this is $(uname -m)"

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo "$@"; else return 1; fi; }
update() { as_root apt-get update -qq >/dev/null 2>&1 || true; }

missing=()
need() { "${@:2}" >/dev/null 2>&1 || missing+=("$1"); }
need qemu-system-x86 command -v qemu-system-x86_64
need busybox-static test -x /bin/busybox
need kmod test -x /sbin/modprobe
need iproute2 test -x /sbin/tc -o -x /usr/sbin/tc
need python3-pyverbs test -e /usr/lib/python3/dist-packages/pyverbs/__init__.py
need ibverbs-providers sh -c 'ls /usr/lib/*/libibverbs/librxe*.so'
need rdma-core test -e /etc/rdma/modules
if [ ${#missing[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || cannot "install these first (names as in Debian): ${missing[*]}"
  echo "rdma: installing ${missing[*]}" >&2
  update
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$cache/apt.log" 2>&1 \
    || cannot "can't install ${missing[*]} ($cache/apt.log)"
fi

# Where nothing but pyverbs can be imported from: an interpreter of its own (.venv) must not see the system's other packages.
mkdir -p "$cache/python"
ln -sfn /usr/lib/python3/dist-packages/pyverbs "$cache/python/pyverbs"

# The plain flavour: the cloud kernel is built without Soft-RoCE.
newest() { apt-cache search --names-only '^linux-image-6\.12\.[0-9]+\+deb[0-9]+-amd64$' 2>/dev/null | cut -d' ' -f1 | sort -V | tail -1; }
package=$(newest)
[ -n "$package" ] || { update; package=$(newest); }
if [ -z "$package" ]; then # no package lists, but perhaps a kernel of an earlier time
  kept=$(find "$cache" -maxdepth 1 -type d -name 'linux-image-*' -not -name '*.part' | sort -V | tail -1)
  [ -n "$kept" ] || cannot "apt offers no linux-image-6.12 of the plain amd64 flavour"
  echo "$kept"
  exit
fi
kernel=$cache/$package
if [ ! -d "$kernel" ]; then
  echo "rdma: unpacking $package" >&2
  part=$kernel.part
  rm -rf "$part" && mkdir -p "$part"
  (cd "$part" && { apt-get download -qq "$package" || { update; apt-get download -qq "$package"; }; }) >"$cache/apt.log" 2>&1 \
    || cannot "can't download $package ($cache/apt.log)"
  dpkg-deb -x "$part"/*.deb "$part" && rm -f "$part"/*.deb
  /sbin/depmod -b "$part" "$(basename "$part"/lib/modules/*)"
  mv "$part" "$kernel"
fi
echo "$kernel"
