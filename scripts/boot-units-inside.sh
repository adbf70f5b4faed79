#!/usr/bin/env bash
# The part of boot-units.sh that runs inside the container, as root, beside a systemd of its own. Report on stdout, the rest on stderr.
set -uo pipefail
ok() { if "${@:2}" >&2; then printf 'PASS  %s\n' "$1"; else printf 'FAIL  %s\n' "$1"; fi; }
as() { setpriv --reuid "$1" --regid "$(id -g "$1")" --init-groups "${@:2}"; }
value() { systemctl show -P "$1" "$2"; }
answers() { # answers PORT PATH STATUS, within 20 s
  local end=$((SECONDS + 20))
  while [ $SECONDS -lt $end ]; do
    exec 3<>"/dev/tcp/127.0.0.1/$1" && printf 'GET %s HTTP/1.1\r\n\r\n' "$2" >&3 && head -1 <&3 | grep -q " $3 " && return 0
    sleep 0.3
  done 2>/dev/null
  return 1
}
becomes() { # becomes UNIT PROPERTY VALUE, within 30 s
  local end=$((SECONDS + 30))
  while [ $SECONDS -lt $end ]; do [ "$(value "$2" "$1")" = "$3" ] && return 0; sleep 0.3; done
  systemctl --no-pager status "$1"
  return 1
}
not() { ! "$@"; }

systemd-sysusers && systemd-tmpfiles --create pp1q.conf
useradd -g pp1q pp1q-engine && useradd -g pp1q pp1q-other
engine=$(id -u pp1q-engine)
keys=/etc/pp1q/keys
as pp1q /opt/pp1q/bin/pp1q keys new leader --dir $keys >&2
as pp1q /opt/pp1q/bin/pp1q keys new receiver-rank0 --dir $keys >&2
as pp1q /opt/pp1q/bin/pp1q keys allow $keys/allowed $keys/leader.public >&2
for name in leader receiver-rank0; do
  # A group of one on this host; everything else as an operator gets it.
  sed "s/^group_size = .*/group_size = 1/; s/receiver0.example/127.0.0.1/; s/^allow_uids = .*/allow_uids = [$engine]/
    /^\[group\]/,/^\[breaker\]/{/^\[breaker\]/!d}" "/pp1q-test/$name.toml" >"/etc/pp1q/$name.toml"
done
leader=pp1q-leader.service receiver=pp1q-receiver@0.service

journal() { journalctl --no-pager -u 'pp1q-*' >&2; }
if ! systemctl start $leader $receiver >&2; then
  echo "FAIL  both units start, and say that they are ready"
  journal
  exit
fi
echo "PASS  both units start, and say that they are ready"
ok "the leader's daemon is ready for use" answers 9109 /readyz 200
ok "the receiver's daemon is ready for use" answers 9110 /readyz 200
ok "a listed uid may ask" as pp1q-engine /opt/pp1q/bin/pp1q top --once /run/pp1q-leader/leader.sock
ok "another uid of the group may not" not as pp1q-other /opt/pp1q/bin/pp1q top --once /run/pp1q-leader/leader.sock
ok "someone outside the group may not" not as nobody /opt/pp1q/bin/pp1q top --once /run/pp1q-leader/leader.sock
status=/proc/$(value MainPID $leader)/status
ok "the sandbox is on" grep -q $'^Seccomp:\t2' "$status"
ok "no capability is left" grep -q $'^CapEff:\t0000000000000000' "$status"

sed -i 's/^drain_s = .*/drain_s = 5.0/' /etc/pp1q/leader.toml
ok "a reload is taken over" systemctl reload $leader
sed -i.good 's/^depth = .*/depth = 99/' /etc/pp1q/leader.toml
ok "a reload of a bad file fails where one looks" not systemctl reload $leader
ok "and leaves the daemon as it was" answers 9109 /readyz 200

before=$(value MainPID $receiver)
kill -STOP "$before"
ok "a daemon that hangs is ended and started again" becomes $receiver NRestarts 1
ok "and its session forms again" answers 9110 /readyz 200

systemctl restart $leader >&2 2>&1
ok "a bad setting ends it with status 2" becomes $leader ExecMainStatus 2
sleep 5
ok "for which nothing is started again" test "$(value ActiveState $leader) $(value NRestarts $leader)" = "failed 0"
mv /etc/pp1q/leader.toml.good /etc/pp1q/leader.toml
ok "mended, it starts" systemctl start $leader
ok "and is ready again" answers 9109 /readyz 200

ok "both stop" systemctl stop $leader $receiver
ok "with status 0 after a whole drain" test "$(value Result $leader) $(value ExecMainStatus $leader)" = "success 0"
ok "and leave nothing in /run" not ls /run/pp1q-leader /run/pp1q-receiver-0
journal
echo DONE
