#!/bin/sh
# Makes the two base images out of Debian packages, for machines that reach no image registry:
#     RUNTIME  Debian, Python, CA certificates
#     BUILD    the same and pip
# in buildah's store. Needs root, debootstrap and buildah.
#     debian_base.sh RUNTIME BUILD [MIRROR]
set -eu
runtime=$1 build=$2 mirror=${3:-http://deb.debian.org/debian}
export STORAGE_DRIVER=overlay BUILDAH_ISOLATION=chroot

container=$(buildah from scratch)
trap 'buildah rm "$container" >/dev/null' EXIT
root=$(buildah mount "$container")

trim() {
    rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/usr/share/doc "$root"/usr/share/man \
        "$root"/usr/share/info "$root"/usr/share/locale
    find "$root" -xdev -name __pycache__ -path '*/dist-packages/*' -prune -exec rm -rf {} +
}

debootstrap --variant=minbase --include=python3,python3-pip,ca-certificates bookworm "$root" "$mirror"
trim
buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --env LANG=C.UTF-8 --cmd /bin/bash "$container"
buildah commit --quiet "$container" "$build"

chroot "$root" dpkg --purge python3-pip python3-setuptools python3-wheel python3-distutils python3-lib2to3 python3-pkg-resources
trim
buildah commit --quiet "$container" "$runtime"
