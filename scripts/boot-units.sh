#!/usr/bin/env bash
# Boots a systemd in a container over a throw-away copy of this machine and runs the real daemons under the real units, sandbox and all:
# what no linter can see (a system call that the sandbox forbids, a reload that can't find its program). Needs root, .venv (make demo)
# and a kernel that lets systemd-nspawn run; elsewhere it says SKIP. Nothing of this machine is changed; a minute.
set -euo pipefail
cd "$(dirname "$0")/.."
skip() { printf 'SKIP  %-22s %s\n' "units under systemd" "$1"; exit 0; }
[ "$(id -u)" = 0 ] || skip "only root can boot a container"
.venv/bin/pp1q daemon --help >/dev/null 2>&1 || skip "no pp1q daemon in .venv: run make demo"
command -v apt-get >/dev/null || skip "no apt-get to install systemd-container with"
if ! command -v systemd-nspawn >/dev/null; then
  apt-get update -qq >/dev/null 2>&1 || true
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends systemd systemd-container >/dev/null 2>&1 \
    || skip "systemd-container can't be installed"
fi

room=$(mktemp -d)
root=$room/root
finish() { umount -l "$root" 2>/dev/null || true; umount -l "$room" 2>/dev/null || true; rm -rf --one-file-system "$room"; }
trap finish EXIT
mount -t tmpfs -o size=1g,mode=0755 pp1q-boot "$room" 2>/dev/null || skip "no tmpfs can be mounted"
mkdir "$room/upper" "$room/work" "$root"
mount -t overlay -o "lowerdir=/,upperdir=$room/upper,workdir=$room/work" overlay "$root" 2>/dev/null || skip "no overlay over / can be mounted"

# This machine's own units stay out; ours, and the one that drives the test, come in.
rm -rf "$root/etc/systemd/system" "$root/etc/pp1q" "$root/opt/pp1q" "$root/etc/fstab" "$root/etc/machine-id"
mkdir -p "$root/etc/systemd/system" "$root/usr/lib/sysusers.d" "$root/usr/lib/tmpfiles.d" "$root/opt/pp1q/bin" "$root/opt/pp1q/lib" "$root/pp1q-test"
cp deploy/systemd/*.service "$root/etc/systemd/system/"
cp deploy/systemd/pp1q.sysusers.conf "$root/usr/lib/sysusers.d/pp1q.conf"
cp deploy/systemd/pp1q.tmpfiles.conf "$root/usr/lib/tmpfiles.d/pp1q.conf"
# The package as it is built in .venv, where the daemon's user may read it.
cp -r .venv/lib/python3*/site-packages/. "$root/opt/pp1q/lib/"
rm -rf "$root"/opt/pp1q/lib/__editable__* "$root"/opt/pp1q/lib/pp1q_transport
cp -r pp1q_transport "$root/opt/pp1q/lib/"
python=$(readlink -f .venv/bin/python)
case $python in
  "$HOME"/* | /home/*) # the units see no home; Debian's own interpreter serves if it is of the same version
    same=/usr/bin/$(.venv/bin/python -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    [ -x "$same" ] || skip "$python lies in a home, and there is no $same"
    python=$same ;;
esac
printf '#!%s -P\nimport sys\nsys.path.insert(0, "/opt/pp1q/lib")\nfrom pp1q_transport.cli import main\nmain()\n' "$python" >"$root/opt/pp1q/bin/pp1q"
chmod 0755 "$root/opt/pp1q/bin/pp1q"
cp deploy/examples/leader.toml deploy/examples/receiver-rank0.toml "$root/pp1q-test/"
cp scripts/boot-units-inside.sh "$root/pp1q-test/inside.sh"
cat >"$root/etc/systemd/system/pp1q-test.service" <<'UNIT'
[Unit]
Description=Drives the units
After=basic.target
SuccessAction=exit-force
FailureAction=exit-force
[Service]
Type=oneshot
ExecStart=/bin/bash /pp1q-test/inside.sh
StandardOutput=file:/pp1q-test/report
StandardError=file:/pp1q-test/log
TimeoutStartSec=540
UNIT

timeout 600 systemd-nspawn --quiet --directory="$root" --register=no --keep-unit --private-network --console=pipe --boot \
  systemd.unit=pp1q-test.service </dev/null >"$room/console" 2>&1 || true
if [ ! -s "$root/pp1q-test/report" ]; then
  skip "no container boots here: $(grep -v '^$' "$room/console" | tail -1 | tr -d '\r' | cut -c1-100)"
fi
cat "$root/pp1q-test/report"
if grep -q '^FAIL' "$root/pp1q-test/report" || ! grep -q '^DONE' "$root/pp1q-test/report"; then
  sed 's/^/      | /' "$root/pp1q-test/log" | tail -60
  exit 1
fi
