# QEMU's arguments and what it boots, for `boot`, `run` and `test`. Sourced after lib.sh.
# shellcheck shell=bash

SCRIPTS_QEMU=$ROOT/scripts/qemu
INITRAMFS_OPTIONS=()
QEMU=${QEMU:-qemu-system-x86_64}

# Prints the version as a number that compares: 10.0.2 is 1000, 7.2 is 702.
qemu_version() {
    "$QEMU" --version | awk '/version/ { split($4, v, "."); print v[1] * 100 + v[2]; exit }'
}

# A disk whose backend comes later, or comes back, is waited for. QEMU 9.2 renamed the option and its unit.
qemu_reconnect() {
    if [ "$(qemu_version)" -ge 902 ]; then echo reconnect-ms=500; else echo reconnect=1; fi
}

# qemu_disks SOCKET[,DEVICE-OPTION=VALUE...]...: appends to the array QEMU_ARGUMENTS.
qemu_disks() {
    local disk options i=0 reconnect
    reconnect=$(qemu_reconnect)
    for disk; do
        options=${disk#"${disk%%,*}"}
        QEMU_ARGUMENTS+=(
            -chardev "socket,id=c$i,path=${disk%%,*},$reconnect"
            -device "vhost-user-blk-pci,chardev=c$i$options"
        )
        i=$((i + 1))
    done
}

# qemu_machine MIB VCPUS ACCELERATOR: appends the machine, with memory that the daemon can share.
qemu_machine() {
    local accelerator=$3
    # More than one thread of emulation has met an assertion in QEMU; these guests need little speed.
    [ "$accelerator" != tcg ] || accelerator=tcg,thread=single
    QEMU_ARGUMENTS+=(
        -object "memory-backend-memfd,id=mem,size=$1M,share=on"
        -machine "q35,memory-backend=mem" -m "$1M" -smp "$2" -accel "$accelerator" -cpu max
    )
    qemu_bare
}

# No device that nobody asked for, and no reading of the user's own configuration.
qemu_bare() { QEMU_ARGUMENTS+=(-nodefaults -no-user-config -display none); }

# choose_accelerator KERNEL: kvm where a guest comes up with it; some hosts have /dev/kvm and kernels hang under it.
choose_accelerator() {
    local verdict
    verdict=$CACHE/accelerator-$1-$(qemu_version)
    if [ ! -w /dev/kvm ]; then
        echo tcg
        return
    fi
    if [ ! -e "$verdict" ]; then
        say "Trying KVM ..."
        if "$SCRIPTS_QEMU/boot" --kernel "$1" --accel kvm --timeout 8 nothing >/dev/null 2>&1; then
            echo kvm >"$verdict"
        else
            echo tcg >"$verdict"
        fi
    fi
    cat "$verdict"
}

compile_hog() {
    rustc -O -C target-feature=+crt-static --edition 2021 -o "$1" "$SCRIPTS_QEMU/guest/hog.rs"
}

# guest_initramfs KERNEL SCRIPT ARGUMENT...: makes $work/initramfs, which runs the script, and sets TOKEN, with which
# the guest marks its end. What changes from boot to boot lies in an archive of its own behind the cached one; the
# kernel unpacks both.
guest_initramfs() {
    local kernel=$1 hog tree=$work/tree base
    shift
    TOKEN=$(od -An -N8 -tx8 /dev/urandom | tr -d ' ')
    hog=$CACHE/hog-$(sha256sum <"$SCRIPTS_QEMU/guest/hog.rs" | cut -c1-16)
    make_once "$hog" compile_hog
    mkdir -p "$tree/guest"
    cp "$SCRIPTS_QEMU"/guest/* "$tree/guest/"
    mv "$tree/guest/init" "$tree/init"
    cp "$hog" "$tree/guest/hog"
    chmod -R 755 "$tree"
    echo "$TOKEN" >"$tree/guest/token"
    printf '%q ' exec "/guest/$1" "${@:2}" >"$tree/guest/command"
    (cd "$tree" && find . | cpio --quiet -o -H newc -R 0:0) >"$work/layer"
    base=$("$SCRIPTS_QEMU/initramfs" "${INITRAMFS_OPTIONS[@]}" "$kernel")
    cat "$base" "$work/layer" >"$work/initramfs"
}
