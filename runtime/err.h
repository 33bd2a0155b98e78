/* The one error of the runtime, for the header that programs see and for the files behind it. */
#ifndef NMK_ERR_H
#define NMK_ERR_H

/* Why a call failed, as a sentence for the user.  Several mistakes are several lines. */
typedef struct nmk_err {
    char text[1024];
} nmk_err;

#endif
