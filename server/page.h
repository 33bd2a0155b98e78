/* The page at /: a chat with the model and what the server is doing, in one file that needs no other. */
#ifndef NMK_SERVER_PAGE_H
#define NMK_SERVER_PAGE_H

extern const char nmk_page[], nmk_page_end[];
extern const char nmk_page_policy[]; /* its Content-Security-Policy */

#endif
