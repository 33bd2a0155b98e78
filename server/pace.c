#include "pace.h"

static const double keep = 0.85;       /* of what is known, at each new chunk or step */
static const double most_growth = 1.5; /* of work, beyond what was timed */
static const double most_times = 3;    /* longer than expected; what is beyond counts as that */

/* Keys that tokens from pos on see, all together, the last one being at end - 1: in a layer that sees `window` of them
 * (0: all). */
static double keys_seen(double pos, double end, double window) {
    if (window <= 0 || end <= window) return (end - pos) * (pos + end + 1) / 2;
    if (pos >= window) return (end - pos) * window;
    return keys_seen(pos, window, 0) + (end - window) * window;
}

double nmk_pace_work(const nmk_pace *p, int pos, int count) {
    const double from = pos, end = from + count;
    return count + p->key_work * keys_seen(from, end, 0) + p->window_key_work * keys_seen(from, end, p->window);
}

int nmk_pace_tokens(const nmk_pace *p, int pos, double work, int most) {
    int low = 0, high = most; /* low: fits */
    while (low < high) {
        const int middle = low + (high - low + 1) / 2;
        if (nmk_pace_work(p, pos, middle) <= work)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* ms = least + slope * work. */
static void line(const nmk_pace *p, double *least_ms, double *slope) {
    const double mean_work = p->work / p->weight, mean_ms = p->ms / p->weight;
    const double spread = p->weight * p->work_squared - p->work * p->work;
    *slope = *least_ms = -1;
    if (spread > 1e-3 * p->work * p->work) {
        *slope = (p->weight * p->work_ms - p->work * p->ms) / spread;
        *least_ms = mean_ms - *slope * mean_work;
    }
    /* Chunks of one size do not say: half and half will do until sizes differ. */
    if (*slope <= 0 || *least_ms < 0) *slope = mean_ms / 2 / mean_work, *least_ms = mean_ms / 2;
}

double nmk_pace_chunk_ms(const nmk_pace *p, double work) {
    double least_ms, slope;
    if (p->weight <= 0) return 0;
    line(p, &least_ms, &slope);
    return least_ms + slope * work;
}

double nmk_pace_room(const nmk_pace *p, bool beside) {
    double least_ms, slope;
    const double unbounded = 1e18;
    if (p->weight <= 0) return beside ? NMK_PACE_FIRST : unbounded;
    line(p, &least_ms, &slope);
    const double ms = beside ? p->budget_ms : NMK_PACE_IDLE_MS;
    double work = slope > 0 ? (ms - least_ms) / slope : unbounded;
    if (beside && work > most_growth * p->most_work) work = most_growth * p->most_work;
    return work < NMK_PACE_FIRST ? NMK_PACE_FIRST : work;
}

/* What counts of a time, where another was expected (0: none was). */
static double tamed(double ms, double expected_ms) {
    return expected_ms > 0 && ms > most_times * expected_ms ? most_times * expected_ms : ms;
}

/* Steps that a chunk of that time is paid back with.  A little more, as the change from one kind of launch to the other
 * is not in their times, and as a prompt has one chunk more than pauses between them. */
static double price(const nmk_pace *p, double ms) { return 1.1 * ms * p->share / (1 - p->share); }

/* A launch that counted as `queued_ms` turned out to count as `ms`.  What is more than was owed is not saved up. */
static void settle(nmk_pace *p, double queued_ms, double ms) {
    p->queued_ms -= queued_ms, p->owed_ms += ms;
    if (p->owed_ms < 0) p->owed_ms = 0;
}

double nmk_pace_queue_chunk(nmk_pace *p, double work, bool beside) {
    const double ms = nmk_pace_chunk_ms(p, work);
    if (beside) p->queued_ms += price(p, ms);
    return ms;
}

void nmk_pace_end_chunk(nmk_pace *p, double work, double ms, double expected_ms, bool beside) {
    const bool known = ms >= 0;
    ms = known ? tamed(ms, expected_ms) : expected_ms;
    if (beside) settle(p, price(p, expected_ms), price(p, ms));
    if (!known) return;
    ms = tamed(ms, nmk_pace_chunk_ms(p, work));
    if (ms < 1e-3) ms = 1e-3;
    const double weight = 1 / (ms * ms);
    p->weight = keep * p->weight + weight, p->work = keep * p->work + weight * work;
    p->ms = keep * p->ms + weight * ms, p->work_ms = keep * p->work_ms + weight * work * ms;
    p->work_squared = keep * p->work_squared + weight * work * work;
    if (work > p->most_work) p->most_work = work;
}

double nmk_pace_queue_step(nmk_pace *p, bool beside) {
    if (beside) p->queued_ms -= p->step_ms;
    return p->step_ms;
}

void nmk_pace_end_step(nmk_pace *p, double ms, double expected_ms, bool beside) {
    const bool known = ms >= 0;
    ms = known ? tamed(ms, expected_ms) : expected_ms;
    if (beside) settle(p, -expected_ms, -ms);
    if (known) p->step_ms = p->step_ms > 0 ? keep * p->step_ms + (1 - keep) * tamed(ms, p->step_ms) : ms;
}

bool nmk_pace_may_chunk(const nmk_pace *p, bool behind_step) {
    return p->owed_ms + p->queued_ms <= (behind_step ? p->step_ms : 0);
}

void nmk_pace_forgive(nmk_pace *p) { p->owed_ms = 0; }

void nmk_pace_drop(nmk_pace *p) { p->owed_ms = p->queued_ms = 0; }
