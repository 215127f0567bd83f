# The boot sector of the small disk of machines.rs: says how often it has booted (its second sector counts), types back what is
# typed; "q" and the power button end it, "r" restarts it. Assembled: as --32 boot.s -o boot.o && ld -m elf_i386 -Ttext 0x7c00
# --oformat binary boot.o -o boot.bin (the bytes up to the last text are BOOT there).
.code16
.globl _start
_start:
  cli
  xorw %ax,%ax
  movw %ax,%ds
  movw %ax,%es
  movw %ax,%ss
  movw $0x7c00,%sp
  movb %dl,0x7e00
  movw $0x602,%dx        # PM1 enable: the power button
  movw $0x100,%ax
  outw %ax,%dx
  movw $hello,%si
  call print
  movw $0x0201,%ax       # the second sector, into 0x8000
  call disk
  incb 0x8000
  movw $0x0301,%ax       # and back
  call disk
  movb 0x8000,%al
  addb $0x30,%al
  call putc
  movb $0x0a,%al
  call putc
again:
  movw $0x600,%dx        # PM1 status
  inw %dx,%ax
  testw $0x100,%ax
  jnz button
  movw $0x3fd,%dx
  inb %dx,%al
  testb $1,%al
  jz again
  movw $0x3f8,%dx
  inb %dx,%al
  cmpb $0x71,%al         # q
  je off
  cmpb $0x72,%al         # r
  je reset
  call putc
  jmp again
button:
  movw $pressed,%si
  call print
off:
  movw $0x604,%dx
  movw $0x2000,%ax
  outw %ax,%dx
stop:
  hlt
  jmp stop
reset:
  movb $0xfe,%al
  outb %al,$0x64
  jmp stop
disk:
  movb 0x7e00,%dl
  movb $0,%dh
  movw $2,%cx
  movw $0x8000,%bx
  int $0x13
  ret
print:
  lodsb
  testb %al,%al
  jz done
  call putc
  jmp print
putc:
  movb %al,%ah
wait:
  movw $0x3fd,%dx
  inb %dx,%al
  testb $0x20,%al
  jz wait
  movw $0x3f8,%dx
  movb %ah,%al
  outb %al,%dx
done:
  ret
hello: .asciz "boot "
pressed: .asciz "pressed\n"
.org 510
.word 0xaa55
