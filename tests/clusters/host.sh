# First process of a simulated host (hosts.py); arguments: NAME HOME ENVIRONMENT CHECKOUT SHARED.
# Paths that differ between hosts are private file systems; all hosts read the machine's other files.
set -eu
name=$1 home=$2 environment=$3 checkout=$4 shared=$5

mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/host/upper /run/host/work /run/host/tmp
mount -t tmpfs tmpfs /dev/shm
# A private overlay of the environment, so that packages installed on this host stay on it.
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
printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$name" > /run/hosts # as on Debian
mount --bind /run/hosts /etc/hosts
awk -F: -v OFS=: -v "home=$home" '$1 == "root" { $6 = home; $7 = "/bin/bash" } 1' /etc/passwd > /run/passwd
mount --bind /run/passwd /etc/passwd
mkdir "$home"
ln -s "$environment" "$home/raytrain-gpt" # installation path

echo ready
exec > /dev/null 2>&1
sleep infinity &
wait
