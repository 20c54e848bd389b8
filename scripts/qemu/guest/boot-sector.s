# A boot sector for a disk or a floppy: it reads the second sector through the BIOS, prints the text there on the first
# serial line, and ends QEMU through isa-debug-exit: with 33 when it could read, with 35 when not.
    .intel_syntax noprefix
    .code16
    .globl _start
_start:
    xor ax, ax
    mov ds, ax
    mov es, ax
    mov ss, ax
    mov sp, 0x7c00
    mov ax, 0x0201 # read one sector ...
    mov cx, 2      # ... of cylinder 0: its second
    mov dh, 0
    mov bx, 0x7e00
    int 0x13
    mov bl, 0x11
    jc end
    mov si, 0x7e00
    cld
next:
    lodsb
    test al, al
    mov bl, 0x10
    jz end
    mov dx, 0x3f8
    out dx, al
    jmp next
end:
    mov al, bl
    out 0xf4, al
    hlt
    .org 510
    .word 0xaa55
