/* The log's lines: levels, escapes, fields that do not fit, the time. */
#define _GNU_SOURCE
#include "log.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "json.h"

static int ends[2];
static char text[8192];

/* What was written since the last call, without its end. */
static const char *logged(void) {
    ssize_t n = read(ends[0], text, sizeof text - 1);
    text[n > 0 ? n : 0] = 0;
    if (n > 0 && text[n - 1] == '\n') text[n - 1] = 0;
    return text;
}

/* Behind time and level. */
static const char *message(void) {
    const char *at = strchr(logged(), ' ');
    return at ? at + 1 : text;
}

static void test_text(void) {
    nmk_log_line l;
    nmk_log_setup(NMK_LOG_INFO, false, ends[1]);
    nmk_log(NMK_LOG_INFO, "draining: finishing what runs");
    check(!strcmp(message(), "info draining: finishing what runs"), "an event", "%s", text);
    nmk_log(NMK_LOG_DEBUG, "nobody reads this");
    check(!*logged(), "below the level", "%s", text);
    nmk_log_begin(&l, NMK_LOG_DEBUG, "nor this");
    nmk_log_text(&l, "a", "b"), nmk_log_int(&l, "c", 1), nmk_log_number(&l, "d", 1), nmk_log_end(&l);
    check(!*logged(), "nor its fields", "%s", text);
    nmk_log_begin(&l, NMK_LOG_WARNING, "request finished");
    nmk_log_int(&l, "id", -12), nmk_log_number(&l, "ttft_ms", 41.23456), nmk_log_text(&l, "finish", "stop");
    nmk_log_text(&l, "none", NULL), nmk_log_number(&l, "rate", 1 / 0.0);
    nmk_log_end(&l);
    check(!strcmp(message(), "warning request finished id=-12 ttft_ms=41.235 finish=stop rate=none"), "fields", "%s",
          text);
    nmk_log_begin(&l, NMK_LOG_ERROR, "x");
    nmk_log_text(&l, "a", "two words"), nmk_log_text(&l, "b", ""), nmk_log_text(&l, "c", "x=\"1\"\n\\");
    nmk_log_text(&l, "d", "h\xc3\xa4ng"), nmk_log_text(&l, "e", "\xff\xc3");
    nmk_log_end(&l);
    check(!strcmp(message(), "error x a=\"two words\" b=\"\" c=\"x=\\\"1\\\"\\u000a\\\\\" d=\"h\xc3\xa4ng\" "
                             "e=\"\xef\xbf\xbd\xef\xbf\xbd\""),
          "values that need quotes", "%s", text);
}

static void test_json(void) {
    nmk_log_line l;
    nmk_err e = {0};
    char big[4000];
    memset(big, 'x', sizeof big - 1), big[sizeof big - 1] = 0;
    nmk_log_setup(NMK_LOG_ERROR, true, ends[1]);
    nmk_log(NMK_LOG_WARNING, "nobody reads this");
    check(!*logged(), "below the level, as JSON", "%s", text);
    nmk_log_begin(&l, NMK_LOG_ERROR, "engine failed");
    nmk_log_text(&l, "reason", "a \"wait\"\tof \xf0\x9f\x98\x80 \xff\x01");
    nmk_log_text(&l, "big", big);
    nmk_log_int(&l, "status", 500), nmk_log_number(&l, "ms", 0 / 0.0);
    nmk_log_end(&l);
    const char *line = logged();
    struct json_object *o = nmk_json_parse(line, strlen(line), &e);
    const char *reason = json_object_get_string(nmk_json_get(o, "reason"));
    check(o && reason && !strcmp(reason, "a \"wait\"\tof \xf0\x9f\x98\x80 \xef\xbf\xbd\x01"), "any bytes", "%s: %s",
          e.text, line);
    check(o && !nmk_json_get(o, "big") && json_object_get_int(nmk_json_get(o, "status")) == 500,
          "a field that does not fit is left out, the next is there", "%s", line);
    check(strstr(line, "\"ms\":null"), "no number", "%s", line);
    json_object_put(o);

    /* as many fields as there is room for, and a line that is still whole */
    nmk_log_begin(&l, NMK_LOG_ERROR, "many");
    for (int i = 0; i < 1000; i++) nmk_log_text(&l, "key", "va\"lue");
    nmk_log_end(&l);
    line = logged();
    o = nmk_json_parse(line, strlen(line), &e);
    check(strlen(line) > 1800 && line[strlen(line) - 1] == '}', "a full line is whole", "%s: %s", e.text, line);
    json_object_put(o);
}

static void test_time(void) {
    time_t before = time(NULL);
    struct tm tm = {0};
    char again[32];
    nmk_log_setup(NMK_LOG_INFO, false, ends[1]);
    nmk_log(NMK_LOG_INFO, "x");
    logged();
    time_t now = strptime(text, "%Y-%m-%dT%H:%M:%S", &tm) ? timegm(&tm) : 0;
    strftime(again, sizeof again, "%Y-%m-%dT%H:%M:%S", &tm);
    check(now >= before && now <= time(NULL) && !strncmp(again, text, 19) && text[19] == '.' && text[23] == 'Z',
          "the time, in UTC", "%s", text);
}

/* Nobody reads: the writer goes on, and says later what was lost. */
static void test_unread(void) {
    enum { LINES = 4000 };
    static char all[1 << 18];
    int full[2], whole = 0, lost = 0, cut = 0;
    if (pipe2(full, 0)) exit(2);
    nmk_log_setup(NMK_LOG_INFO, false, full[1]);
    alarm((unsigned)time_limit(20)); /* a write that waits for ever ends the test */
    for (int i = 0; i < LINES; i++) nmk_log(NMK_LOG_INFO, "a line that fills the pipe");
    alarm(0);
    size_t n = 0;
    for (int turn = 0; turn < 2; turn++) {
        fcntl(full[0], F_SETFL, O_NONBLOCK);
        for (ssize_t did; (did = read(full[0], all + n, sizeof all - 1 - n)) > 0;) n += (size_t)did;
        if (!turn) nmk_log(NMK_LOG_INFO, "somebody reads again");
    }
    all[n] = 0;
    for (char *line = strtok(all, "\n"); line; line = strtok(NULL, "\n")) {
        const char *at = strstr(line, " warning log lines were lost, as nobody read them lines=");
        if (at)
            lost += atoi(strchr(at, '=') + 1);
        else if (strstr(line, " info a line that fills the pipe") || strstr(line, " info somebody reads again"))
            whole++;
        else
            cut++;
    }
    check(whole > 100 && lost > 100 && whole + lost == LINES + 1 && !cut,
          "lines that nobody reads are lost, and counted", "%d whole, %d lost, %d cut, of %d", whole, lost, cut,
          LINES + 1);
    close(full[0]), close(full[1]);
}

int main(void) {
    nmk_log_level level;
    if (pipe2(ends, O_NONBLOCK)) return 2;
    test_text();
    test_json();
    test_time();
    test_unread();
    check(nmk_log_level_read("warning", &level) && level == NMK_LOG_WARNING && !nmk_log_level_read("warn", &level),
          "levels by name", "%d", level);
    return failures != 0;
}
