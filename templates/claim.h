/* How units of work whose number only run time knows come to SMs; pasted after the constants of abi.h.
 *
 * Units are numbered.  The SM of rank r has the units r, r + NMK_SMS, ... for some rounds without asking anybody; then
 * whoever is free draws the next number from the node's ticket.  Who computes a unit does not change its bits. */

/* Rounds that are dealt by number.  NMK_CLAIM_TAIL leaves the last ones to tickets, because SMs do not stream equally
 * fast, and only those, because a ticket costs an atomic's way to L2 and back. */
NMK_SHARED int nmk_claim_rounds(int how, int units, int rank) {
    if (how == NMK_CLAIM_QUEUE) return 0;
    if (how == NMK_CLAIM_STATIC) return (units - rank + NMK_SMS - 1) / NMK_SMS;
    const int rounds = units / NMK_SMS, dealt = rounds - 2 - rounds / 12;
    return dealt > 0 ? dealt : 0;
}
