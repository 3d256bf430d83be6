# The first process of a made host (hosts.py): NAME HOME ENVIRONMENT CHECKOUT SHARED.
# Own file systems where hosts differ; what lies elsewhere is the machine's, read by all.
set -eu
name=$1 home=$2 environment=$3 checkout=$4 shared=$5

mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/host/upper /run/host/work /run/host/tmp
mount -t tmpfs tmpfs /dev/shm
# An environment of its own: what is installed on this host stays here.
mount -t overlay overlay -o "lowerdir=$environment,upperdir=/run/host/upper,workdir=/run/host/work" "$environment"
mount --bind "$shared" /mnt
case $checkout in
/tmp/*)
  mkdir -p "/run/host$checkout"
  mount --rbind "$checkout" "/run/host$checkout"
  ;;
esac
mount --rbind /run/host/tmp /tmp

hostname "$name"
printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$name" > /run/hosts # as Debian has it
mount --bind /run/hosts /etc/hosts
awk -F: -v OFS=: -v "home=$home" '$1 == "root" { $6 = home; $7 = "/bin/bash" } 1' /etc/passwd > /run/passwd
mount --bind /run/passwd /etc/passwd
mkdir "$home"
ln -s "$environment" "$home/raytrain-gpt" # where it is installed

echo ready
exec > /dev/null 2>&1
sleep infinity &
wait
