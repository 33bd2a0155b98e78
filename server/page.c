#include "page.h"

/* The page as it is in the tree is part of the program. */
__asm__(".section .rodata\n"
        ".global nmk_page\n"
        ".global nmk_page_end\n"
        "nmk_page:\n"
        ".incbin \"server/page.html\"\n"
        "nmk_page_end:\n"
        ".byte 0\n"
        ".previous\n");

/* Whatever a model says, the page runs nothing but its own script and talks to nobody but this server. */
const char nmk_page_policy[] =
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
