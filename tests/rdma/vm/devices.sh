# Sourced in the machine: three Soft-RoCE devices. `rxe0` on a dummy, which talks to itself; `rxe_a` and `rxe_b` at the ends of one cable,
# a veth pair. Both of its addresses are this host's, so rules make traffic between them take the cable instead of the loopback.
export RXE_ONE=rxe0 RXE_A=rxe_a RXE_B=rxe_b
export ADDRESS_ONE=10.77.1.1 ADDRESS_A=10.77.2.1 ADDRESS_B=10.77.2.2
export CABLE_A=cable_a CABLE_B=cable_b

# rxe has its sockets in the first network namespace only, so the two ends can't be told apart by namespaces.
wire() { # also after a link was down, which loses routes
  local at_a at_b
  read -r at_a </sys/class/net/$CABLE_A/address
  read -r at_b </sys/class/net/$CABLE_B/address
  ip -batch - <<END
link set $CABLE_A up
link set $CABLE_B up
route replace $ADDRESS_B/32 dev $CABLE_A src $ADDRESS_A table 101
route replace $ADDRESS_A/32 dev $CABLE_B src $ADDRESS_B table 102
neigh replace $ADDRESS_B lladdr $at_b dev $CABLE_A nud permanent
neigh replace $ADDRESS_A lladdr $at_a dev $CABLE_B nud permanent
END
}

make_devices() {
  local cable
  modprobe -a ib_uverbs rdma_ucm rdma_rxe dummy veth sch_netem
  ip link add dummy_one type dummy
  ip addr add $ADDRESS_ONE/24 dev dummy_one
  ip link set dummy_one up
  ip link add $CABLE_A type veth peer name $CABLE_B
  ip addr add $ADDRESS_A/32 dev $CABLE_A
  ip addr add $ADDRESS_B/32 dev $CABLE_B
  echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
  for cable in $CABLE_A $CABLE_B; do
    echo 1 >/proc/sys/net/ipv4/conf/$cable/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/$cable/rp_filter
  done
  # What comes in by the cable is ours; what goes to the other end leaves by it; only then the loopback.
  ip rule add pref 10 iif $CABLE_A lookup local
  ip rule add pref 11 iif $CABLE_B lookup local
  ip rule add pref 20 oif $CABLE_A lookup 101
  ip rule add pref 21 oif $CABLE_B lookup 102
  ip rule add pref 22 from $ADDRESS_A to $ADDRESS_B lookup 101
  ip rule add pref 23 from $ADDRESS_B to $ADDRESS_A lookup 102
  ip rule add pref 100 lookup local
  ip rule del pref 0
  wire
  rdma link add $RXE_ONE type rxe netdev dummy_one
  rdma link add $RXE_A type rxe netdev $CABLE_A
  rdma link add $RXE_B type rxe netdev $CABLE_B
}

all_processors() { # the machine boots on one
  local switch
  for switch in /sys/devices/system/cpu/cpu*/online; do
    echo 1 >"$switch" || return
  done
}
