#!/bin/busybox sh
# The first process in the machine. Its root becomes the host's own, read-only under two layers of memory (copies of what Python
# reads most, then what is written), so that every path is the same inside and outside; the results folder alone is shared for writing. Runs the results folder's `command`, leaves its status there.
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
for module in /modules/*; do $b insmod "$module" || echo "insmod $module failed"; done
share() { $b mkdir -p "$2" && $b mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$3" "$1" "$2" || echo "no share $1"; }
share results /results cache=none,access=any
results=$($b cat /results/place)

share host /host ro,cache=loose
$b mkdir -p /layer /whole
$b mount -t tmpfs layer /layer
$b mkdir /layer/upper /layer/work
$b mount -t overlay -o lowerdir=/files:/host,upperdir=/layer/upper,workdir=/layer/work whole /whole || echo "no overlay"
for kind in proc sys dev; do $b mkdir -p "/whole/$kind" && $b mount --move "/$kind" "/whole/$kind"; done
for place in run dev/shm; do $b mkdir -p "/whole/$place" && $b mount -t tmpfs -o mode=1777 memory "/whole/$place"; done
$b mkdir -p /whole/dev/pts && $b mount -t devpts devpts /whole/dev/pts
$b mkdir -p "/whole$results" && $b mount --bind /results "/whole$results"
share kernel /kernel ro,cache=loose
$b mkdir -p /whole/usr/lib/modules && $b mount --bind /kernel/lib/modules /whole/usr/lib/modules
# The kernel asks for modules by a program in this first root.
printf '#!/bin/busybox sh\nexec /bin/busybox chroot /whole /sbin/modprobe "$@"\n' >/sbin/modprobe
$b chmod 0755 /sbin/modprobe
$b ip link set lo up
$b hostname rdma-lanes

# Output goes to a console of its own, so that the kernel's messages stay apart from it.
$b stty -F /whole/dev/hvc0 raw -echo -opost
$b setsid $b chroot /whole /bin/bash "$results/command" </whole/dev/hvc0 >/whole/dev/hvc0 2>&1
echo $? >/results/status
$b sync
$b usleep 100000 # what is in the console's ring gets out
$b mount -t proc proc /proc
$b poweroff -f
