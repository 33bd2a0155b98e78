/* The emitted kernel as bytes inside the program.  NMK_KERNEL_PATH: the emitted megakernel.cu, a string literal. */
__asm__(".section .rodata\n"
        ".global nmk_kernel_source\n"
        ".global nmk_kernel_source_end\n"
        "nmk_kernel_source:\n"
        ".incbin \"" NMK_KERNEL_PATH "\"\n"
        "nmk_kernel_source_end:\n"
        ".byte 0\n"
        ".previous\n");
