# QEMU's arguments, for `boot`, `run` and `test`. Sourced after lib.sh.
# shellcheck shell=bash

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
        -machine q35,memory-backend=mem -m "$1M" -smp "$2" -accel "$accelerator" -cpu max
    )
    qemu_bare
}

# No device that nobody asked for, and no reading of the user's own configuration.
qemu_bare() { QEMU_ARGUMENTS+=(-nodefaults -no-user-config -display none); }
