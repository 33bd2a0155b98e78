#define _GNU_SOURCE /* memmem */
#include "template.h"

#include <errno.h>
#include <lauxlib.h>
#include <locale.h>
#include <lua.h>
#include <lualib.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <utf8proc.h>

#include "json.h"
#include "utf8.h"

/* The name of a template's chunk in Lua's debug information: how its lines are told apart from those of our own. */
#define CHUNK "template"

enum {
    MAX_TEMPLATE_BYTES = 4 << 20,
    MAX_CONFIG_BYTES = 64 << 20,
    MAX_VALUE_DEPTH = 200,
    HOOK_INSTRUCTIONS = 1000,
    COLLECT_BYTES = 8 << 20, /* more than this is collected after a render, less is left to Lua */
};

static const nmk_template_limits default_limits = {
    .memory_bytes = (size_t)256 << 20,
    .output_bytes = (size_t)32 << 20,
    .instructions = 1000000000,
    .time_ns = 10000000000,
};

struct nmk_template {
    lua_State *lua;
    pthread_mutex_t lock;
    nmk_template_limits limits;
    size_t used_bytes;
    int run;                            /* registry: jinja_lib's run */
    int compile;                        /* registry: jinja's compile */
    int default_template, tool_use;     /* registry: compiled, LUA_NOREF if there is none */
    uint64_t instructions, deadline_ns; /* of the call that runs */
    int64_t now_s;
    nmk_buf source;
};

/* The Lua sources are part of the program. */
#define EMBED(name, file) \
    __asm__(".section .rodata\n" name ":\n.incbin \"" file "\"\n" name "_end:\n.byte 0\n.previous\n")
EMBED("nmk_jinja_lua", "server/jinja.lua");
EMBED("nmk_jinja_lib_lua", "server/jinja_lib.lua");
extern const char nmk_jinja_lua[], nmk_jinja_lua_end[], nmk_jinja_lib_lua[], nmk_jinja_lib_lua_end[];

/* ---------------------------------------------------------------- limits */

/* Refuses what would go over the limit; Lua then collects its garbage and asks again. */
static void *allocate(void *user, void *old, size_t old_bytes, size_t bytes) {
    nmk_template *t = user;
    if (!old) old_bytes = 0; /* then it is the kind of the object */
    if (!bytes) {
        free(old);
        t->used_bytes -= old_bytes;
        return NULL;
    }
    if (bytes > old_bytes && bytes - old_bytes > t->limits.memory_bytes - t->used_bytes) return NULL;
    void *p = realloc(old, bytes);
    if (p) t->used_bytes += bytes - old_bytes;
    return p;
}

static nmk_template *owner(lua_State *L) {
    void *user;
    lua_getallocf(L, &user);
    return user;
}

static void check_time(lua_State *L, const nmk_template *t) {
    if (nmk_now_ns() <= t->deadline_ns) return;
    lua_pushfstring(L, "takes longer than %d ms", (int)(t->limits.time_ns / 1000000));
    lua_error(L);
}

static void count(lua_State *L, lua_Debug *ar) {
    (void)ar;
    nmk_template *t = owner(L);
    if (t->instructions < HOOK_INSTRUCTIONS) {
        lua_pushliteral(L, "runs for too long (an endless loop?)");
        lua_error(L);
    }
    t->instructions -= HOOK_INSTRUCTIONS;
    check_time(L, t);
}

/* For work that no instruction counts: so many bytes are as good as one instruction. */
static void charge(lua_State *L, size_t bytes) {
    nmk_template *t = owner(L);
    uint64_t cost = bytes / 16;
    if (cost < HOOK_INSTRUCTIONS) return;
    t->instructions = cost < t->instructions ? t->instructions - cost : 0;
    count(L, NULL);
}

/* ---------------------------------------------------------------- text */

static const char *text_at(lua_State *L, int arg, size_t *bytes) {
    const char *s = luaL_checklstring(L, arg, bytes);
    charge(L, *bytes);
    return s;
}

/* Python's str.isspace, which includes four separators that Unicode calls control characters. */
static bool is_space(uint32_t c) {
    if (c < 128) return c == ' ' || (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x1f);
    return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

/* Python's str.isprintable. */
static bool is_printable(uint32_t c) {
    if (c < 128) return c >= 32 && c != 127;
    switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS: return false;
    default: return true;
    }
}

static int character_bytes(const char *p) {
    unsigned char c = (unsigned char)*p;
    return c < 0xc0 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
}

static void add_code(luaL_Buffer *b, uint32_t c) {
    utf8proc_uint8_t bytes[4];
    luaL_addlstring(b, (const char *)bytes, (size_t)utf8proc_encode_char((utf8proc_int32_t)c, bytes));
}

static int text_length(lua_State *L) {
    size_t n, count_of = 0;
    const char *s = text_at(L, 1, &n);
    for (size_t i = 0; i < n; i++) count_of += (s[i] & 0xc0) != 0x80;
    lua_pushinteger(L, (lua_Integer)count_of);
    return 1;
}

/* (s, from, to): the characters from..to-1, counted from 0; the bounds lie within the text. */
static int text_slice(lua_State *L) {
    size_t n;
    const char *s = text_at(L, 1, &n), *end = s + n, *p = s;
    lua_Integer from = luaL_checkinteger(L, 2), to = luaL_checkinteger(L, 3), at = 0;
    for (; at < from && p < end; at++) p += character_bytes(p);
    const char *first = p;
    for (; at < to && p < end; at++) p += character_bytes(p);
    lua_pushlstring(L, first, (size_t)(p - first));
    return 1;
}

/* (s, what, start, last): where `what` is, from byte `start` on, or the last of it; nothing if it is not there. */
static int text_find(lua_State *L) {
    size_t n, m;
    const char *s = text_at(L, 1, &n), *what = text_at(L, 2, &m);
    size_t start = (size_t)luaL_checkinteger(L, 3) - 1;
    bool last = lua_toboolean(L, 4);
    if (start > n) return 0;
    const char *found = memmem(s + start, n - start, what, m);
    if (last && !m) found = s + n;
    for (size_t work = 0; last && m && found;) {
        const char *next = memmem(found + 1, (size_t)(s + n - found) - 1, what, m);
        if (!next) break;
        work += m + (size_t)(next - found); /* each look reads `what` again */
        if (work > 1 << 20) charge(L, work), work = 0;
        found = next;
    }
    if (!found) return 0;
    lua_pushinteger(L, found - s + 1);
    return 1;
}

static bool in_set(const char *p, int bytes, const char *set, size_t set_bytes) {
    if (!set) return is_space(nmk_utf8_at(p));
    for (const char *q = set; q < set + set_bytes; q += character_bytes(q))
        if (character_bytes(q) == bytes && !memcmp(p, q, (size_t)bytes)) return true;
    return false;
}

/* (s, set or nil, sides): without these characters at its start (1), end (2) or both (3). */
static int text_strip(lua_State *L) {
    size_t n, set_bytes = 0;
    const char *s = text_at(L, 1, &n), *end = s + n;
    const char *set = lua_isnoneornil(L, 2) ? NULL : text_at(L, 2, &set_bytes);
    lua_Integer sides = luaL_checkinteger(L, 3);
    size_t work = 0;
    while (sides & 1 && s < end && in_set(s, character_bytes(s), set, set_bytes)) {
        s += character_bytes(s);
        if ((work += set_bytes) > 1 << 20) charge(L, work), work = 0;
    }
    while (sides & 2 && end > s) {
        const char *before = nmk_utf8_before(end);
        if (!in_set(before, (int)(end - before), set, set_bytes)) break;
        end = before;
        if ((work += set_bytes) > 1 << 20) charge(L, work), work = 0;
    }
    lua_pushlstring(L, s, (size_t)(end - s));
    return 1;
}

/* (s, at): the first byte from `at` on that is no space. */
static int text_spaces(lua_State *L) {
    size_t n;
    const char *s = luaL_checklstring(L, 1, &n), *p = s + luaL_checkinteger(L, 2) - 1;
    while (p < s + n && is_space(nmk_utf8_at(p))) p += character_bytes(p);
    lua_pushinteger(L, p - s + 1);
    return 1;
}

/* (s, most): what stands between spaces; after `most` (>= 0) pieces the rest as it is. */
static int text_words(lua_State *L) {
    size_t n;
    const char *p = text_at(L, 1, &n), *end = p + n;
    lua_Integer most = luaL_checkinteger(L, 2), words = 0;
    lua_newtable(L);
    for (;;) {
        while (p < end && is_space(nmk_utf8_at(p))) p += character_bytes(p);
        if (p >= end) break;
        const char *first = p;
        if (most >= 0 && words >= most) {
            p = end;
        }
        while (p < end && !is_space(nmk_utf8_at(p))) p += character_bytes(p);
        lua_pushlstring(L, first, (size_t)(p - first));
        lua_rawseti(L, -2, ++words);
    }
    return 1;
}

/* (s, keep): lines as Python's splitlines. */
static int text_lines(lua_State *L) {
    size_t n;
    const char *p = text_at(L, 1, &n), *end = p + n;
    bool keep = lua_toboolean(L, 2);
    lua_Integer lines = 0;
    lua_newtable(L);
    while (p < end) {
        const char *first = p, *last = end, *next = end;
        for (; p < end; p += character_bytes(p)) {
            uint32_t c = nmk_utf8_at(p);
            if (!(c >= 10 && c <= 13) && !(c >= 0x1c && c <= 0x1e) && c != 0x85 && c != 0x2028 && c != 0x2029) continue;
            last = p;
            next = p + character_bytes(p) + (c == '\r' && p + 1 < end && p[1] == '\n');
            break;
        }
        lua_pushlstring(L, first, (size_t)((keep ? next : last) - first));
        lua_rawseti(L, -2, ++lines);
        p = next;
    }
    return 1;
}

enum { UPPER, LOWER, TITLE, CAPITALIZE, SWAPCASE, WORDS };
static const char *const case_names[] = {"upper", "lower", "title", "capitalize", "swapcase", "words", NULL};

static bool is_lower(uint32_t c) { return utf8proc_category((utf8proc_int32_t)c) == UTF8PROC_CATEGORY_LL; }
static bool is_upper(uint32_t c) { return utf8proc_category((utf8proc_int32_t)c) == UTF8PROC_CATEGORY_LU; }
static bool is_cased(uint32_t c) {
    return is_lower(c) || is_upper(c) || utf8proc_category((utf8proc_int32_t)c) == UTF8PROC_CATEGORY_LT;
}

/* One character to one character, but for the one that everybody knows. */
static void add_upper(luaL_Buffer *b, uint32_t c, bool title) {
    if (c == 0xdf) {
        luaL_addstring(b, title ? "Ss" : "SS");
    } else {
        utf8proc_int32_t code = (utf8proc_int32_t)c;
        add_code(b, (uint32_t)(title ? utf8proc_totitle(code) : utf8proc_toupper(code)));
    }
}

static void add_lower(luaL_Buffer *b, uint32_t c, bool final_sigma) {
    add_code(b, c == 0x3a3 && final_sigma ? 0x3c2 : (uint32_t)utf8proc_tolower((utf8proc_int32_t)c));
}

/* (s, how).  "words" is Jinja's title, where a word begins after one of its own set of characters. */
static int text_case(lua_State *L) {
    size_t n;
    const char *p = text_at(L, 1, &n), *end = p + n;
    int how = luaL_checkoption(L, 2, NULL, case_names);
    luaL_Buffer b;
    luaL_buffinit(L, &b);
    bool begins = true;
    for (const char *s = p; p < end; p += character_bytes(p)) {
        uint32_t c = nmk_utf8_at(p);
        const char *after = p + character_bytes(p);
        bool sigma =
            p > s && is_cased(nmk_utf8_at(nmk_utf8_before(p))) && (after >= end || !is_cased(nmk_utf8_at(after)));
        bool up = how == UPPER || (how == SWAPCASE && is_lower(c)) || (how != LOWER && how != SWAPCASE && begins);
        if (up)
            add_upper(&b, c, how == TITLE || how == CAPITALIZE);
        else if (how == SWAPCASE && !is_upper(c))
            add_code(&b, c);
        else
            add_lower(&b, c, sigma);
        begins = how == TITLE   ? !is_cased(c)
                 : how == WORDS ? is_space(c) || (c < 128 && strchr("-({[<", (int)c) && c)
                                : false;
    }
    luaL_pushresult(&b);
    return 1;
}

static const char *const is_names[] = {"isspace", "isdigit", "isalpha", "isalnum", "isupper", "islower", NULL};

/* (s, what): Python's test of the same name. */
static int text_is(lua_State *L) {
    size_t n;
    const char *p = text_at(L, 1, &n), *end = p + n;
    int what = luaL_checkoption(L, 2, NULL, is_names);
    bool all = n > 0, cased = false;
    for (; p < end && all; p += character_bytes(p)) {
        uint32_t c = nmk_utf8_at(p);
        utf8proc_category_t kind = utf8proc_category((utf8proc_int32_t)c);
        bool letter = kind >= UTF8PROC_CATEGORY_LU && kind <= UTF8PROC_CATEGORY_LO;
        bool digit = kind >= UTF8PROC_CATEGORY_ND && kind <= UTF8PROC_CATEGORY_NO;
        switch (what) {
        case 0: all = is_space(c); break;
        case 1: all = kind == UTF8PROC_CATEGORY_ND; break;
        case 2: all = letter; break;
        case 3: all = letter || digit; break;
        case 4: all = !is_lower(c) && kind != UTF8PROC_CATEGORY_LT; break;
        default: all = !is_upper(c) && kind != UTF8PROC_CATEGORY_LT; break;
        }
        cased = cased || is_lower(c) || is_upper(c);
    }
    lua_pushboolean(L, all && (what < 4 || cased));
    return 1;
}

/* Strings are compared by code point, which is by byte in UTF-8; Lua's own < follows the locale. */
static int text_less(lua_State *L) {
    size_t n, m;
    const char *a = text_at(L, 1, &n), *b = text_at(L, 2, &m);
    int order = memcmp(a, b, n < m ? n : m);
    lua_pushboolean(L, order < 0 || (order == 0 && n < m));
    return 1;
}

/* Python's repr of a float: the shortest text that reads back the same. */
static int float_text(lua_State *L) {
    double x = luaL_checknumber(L, 1);
    char digits[40], out[64];
    if (isnan(x) || isinf(x)) {
        lua_pushstring(L, isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
        return 1;
    }
    int precision = 0;
    do {
        snprintf(digits, sizeof digits, "%.*e", precision, x);
    } while (strtod(digits, NULL) != x && ++precision < 17);
    int exponent = atoi(strchr(digits, 'e') + 1);
    if (exponent < -4 || exponent >= 16) {
        lua_pushstring(L, digits);
        return 1;
    }
    int decimals = precision > exponent ? precision - exponent : 1;
    snprintf(out, sizeof out, "%.*f", decimals, x);
    lua_pushstring(L, out);
    return 1;
}

static int float_fixed(lua_State *L) {
    char out[700]; /* a double has up to 309 digits before the point, and the caller asks for no more than 300 after */
    snprintf(out, sizeof out, "%.*f", (int)luaL_checkinteger(L, 2), luaL_checknumber(L, 1));
    lua_pushstring(L, out);
    return 1;
}

/* (s, ascii): as Python's json.dumps writes it. */
static int json_quote(lua_State *L) {
    size_t n;
    const char *p = text_at(L, 1, &n), *end = p + n;
    bool ascii = lua_toboolean(L, 2);
    luaL_Buffer b;
    luaL_buffinit(L, &b);
    luaL_addchar(&b, '"');
    while (p < end) {
        const char *plain = p;
        while (p < end && (unsigned char)*p >= 32 && *p != '"' && *p != '\\' && (!ascii || (unsigned char)*p < 127))
            p++;
        if (p > plain) luaL_addlstring(&b, plain, (size_t)(p - plain));
        if (p >= end) break;
        uint32_t c = nmk_utf8_at(p);
        const char *at = c && c < 128 ? strchr("\"\"\\\\\nn\rr\tt\bb\ff", (int)c) : NULL;
        char out[16];
        if (at)
            snprintf(out, sizeof out, "\\%c", at[1]);
        else if (c < 0x10000)
            snprintf(out, sizeof out, "\\u%04x", c);
        else
            snprintf(out, sizeof out, "\\u%04x\\u%04x", 0xd800 + ((c - 0x10000) >> 10),
                     0xdc00 + ((c - 0x10000) & 1023));
        luaL_addstring(&b, out);
        p += character_bytes(p);
    }
    luaL_addchar(&b, '"');
    luaL_pushresult(&b);
    return 1;
}

/* Python's repr of a string. */
static int text_repr(lua_State *L) {
    size_t n;
    const char *p = text_at(L, 1, &n), *end = p + n;
    char quote = memchr(p, '\'', n) && !memchr(p, '"', n) ? '"' : '\'';
    luaL_Buffer b;
    luaL_buffinit(L, &b);
    luaL_addchar(&b, quote);
    for (; p < end; p += character_bytes(p)) {
        uint32_t c = nmk_utf8_at(p);
        char out[16];
        if (c == (unsigned char)quote || c == '\\')
            snprintf(out, sizeof out, "\\%c", (char)c);
        else if (c == '\n' || c == '\r' || c == '\t')
            snprintf(out, sizeof out, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
        else if (!is_printable(c))
            snprintf(out, sizeof out, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", c);
        else {
            luaL_addlstring(&b, p, (size_t)character_bytes(p));
            continue;
        }
        luaL_addstring(&b, out);
    }
    luaL_addchar(&b, quote);
    luaL_pushresult(&b);
    return 1;
}

static int time_text(lua_State *L) {
    size_t n;
    const char *format = luaL_checklstring(L, 1, &n);
    time_t now = owner(L)->now_s ? (time_t)owner(L)->now_s : time(NULL);
    struct tm tm;
    char out[512];
    size_t bytes = 0;
    if (n < sizeof out / 2 && localtime_r(&now, &tm)) bytes = strftime(out, sizeof out, format, &tm);
    if (n && !bytes) {
        lua_pushliteral(L, "strftime_now: not a possible format");
        return lua_error(L);
    }
    lua_pushlstring(L, out, bytes);
    return 1;
}

static int memory_limit(lua_State *L) {
    lua_pushinteger(L, (lua_Integer)owner(L)->limits.memory_bytes);
    return 1;
}

static const luaL_Reg primitives[] = {
    {"len", text_length},
    {"slice", text_slice},
    {"find", text_find},
    {"strip", text_strip},
    {"spaces", text_spaces},
    {"words", text_words},
    {"lines", text_lines},
    {"case", text_case},
    {"is", text_is},
    {"less", text_less},
    {"float", float_text},
    {"fixed", float_fixed},
    {"quote", json_quote},
    {"repr", text_repr},
    {"strftime", time_text},
    {"memory", memory_limit},
    {NULL, NULL},
};

/* ---------------------------------------------------------------- values */

static void set_kind(lua_State *L, const char *kind) {
    lua_pushstring(L, kind);
    lua_setfield(L, -2, "kind");
}

/* Pushes a JSON value as jinja_lib's kind of value.  `none` is the stack index of its None. */
static void push_value(lua_State *L, struct json_object *value, int none, int depth) {
    if (depth > MAX_VALUE_DEPTH) luaL_error(L, "the messages are nested too deeply");
    luaL_checkstack(L, 8, NULL);
    switch (json_object_get_type(value)) {
    case json_type_null: lua_pushvalue(L, none); return;
    case json_type_boolean: lua_pushboolean(L, json_object_get_boolean(value)); return;
    case json_type_int: lua_pushinteger(L, json_object_get_int64(value)); return;
    case json_type_double: lua_pushnumber(L, json_object_get_double(value)); return;
    case json_type_string: {
        const char *s = json_object_get_string(value);
        size_t n = (size_t)json_object_get_string_len(value);
        if (!nmk_utf8_valid(s, n)) luaL_error(L, "a text that is not valid UTF-8");
        lua_pushlstring(L, s, n);
        return;
    }
    case json_type_array: {
        int n = (int)json_object_array_length(value);
        lua_createtable(L, n, 1);
        set_kind(L, "list");
        for (int i = 0; i < n; i++) {
            push_value(L, json_object_array_get_idx(value, (size_t)i), none, depth + 1);
            lua_rawseti(L, -2, i + 1);
        }
        return;
    }
    case json_type_object: {
        int n = json_object_object_length(value), i = 0;
        lua_createtable(L, 0, 4);
        set_kind(L, "dict");
        lua_createtable(L, n, 0);
        lua_createtable(L, n, 0);
        lua_createtable(L, 0, n);
        json_object_object_foreach(value, key, member) {
            if (!nmk_utf8_valid(key, strlen(key))) luaL_error(L, "a key that is not valid UTF-8");
            i++;
            lua_pushstring(L, key);
            lua_pushvalue(L, -1);
            lua_rawseti(L, -5, i);
            lua_pushinteger(L, i);
            lua_rawset(L, -3);
            push_value(L, member, none, depth + 1);
            lua_rawseti(L, -3, i);
        }
        lua_setfield(L, -4, "map");
        lua_setfield(L, -3, "vals");
        lua_setfield(L, -2, "keys");
        return;
    }
    }
}

/* ---------------------------------------------------------------- protected calls */

/* Any error to "line L: message", with the line of the template that runs or that the compiler names. */
static int explain(lua_State *L) {
    lua_Integer line = 0;
    const char *text = NULL;
    if (lua_istable(L, 1)) {
        lua_getfield(L, 1, "line");
        line = lua_tointeger(L, -1);
        lua_getfield(L, 1, "message");
        text = lua_tostring(L, -1);
    } else {
        text = lua_tostring(L, 1);
    }
    if (!text) text = "an error without a text";
    if (strstr(text, "stack overflow")) text = "nested too deeply";
    lua_Debug ar;
    for (int level = 0; !line && lua_getstack(L, level, &ar); level++)
        if (lua_getinfo(L, "Sl", &ar) && !strcmp(ar.source, "=" CHUNK)) line = ar.currentline;
    if (line > 0)
        lua_pushfstring(L, "line %I: %s", line, text);
    else
        lua_pushstring(L, text);
    return 1;
}

/* Runs f(data) under the limits.  0, or -1 with "NAME: what". */
static int protect(nmk_template *t, lua_CFunction f, void *data, const char *name, nmk_err *e) {
    lua_State *L = t->lua;
    t->instructions = t->limits.instructions;
    t->deadline_ns = nmk_now_ns() + t->limits.time_ns;
    lua_settop(L, 0);
    lua_pushcfunction(L, explain);
    lua_pushcfunction(L, f); /* light: needs no memory */
    lua_pushlightuserdata(L, data);
    int status = lua_pcall(L, 1, 0, 1);
    int rc = 0;
    if (status == LUA_ERRMEM)
        rc = nmk_fail(e, "%s: takes more than %zu MB of memory", name, t->limits.memory_bytes >> 20);
    else if (status)
        rc = nmk_fail(e, "%s: %s", name, lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "failed");
    lua_settop(L, 0);
    if (t->used_bytes > COLLECT_BYTES) {
        lua_sethook(L, NULL, 0, 0);
        lua_gc(L, LUA_GCCOLLECT);
        lua_sethook(L, count, LUA_MASKCOUNT, HOOK_INSTRUCTIONS);
    }
    return rc;
}

typedef struct {
    nmk_template *t;
    const char *text;
    size_t bytes;
    int *slot;
} compile_job;

static void load_source(lua_State *L, const char *text, const char *end, const char *name) {
    if (luaL_loadbufferx(L, text, (size_t)(end - text), name, "t")) lua_error(L);
}

/* The libraries without what reaches outside, then the two Lua files. */
static int open_state(lua_State *L) {
    compile_job *job = lua_touserdata(L, 1);
    static const luaL_Reg libraries[] = {{LUA_GNAME, luaopen_base},
                                         {LUA_STRLIBNAME, luaopen_string},
                                         {LUA_TABLIBNAME, luaopen_table},
                                         {LUA_MATHLIBNAME, luaopen_math},
                                         {LUA_UTF8LIBNAME, luaopen_utf8}};
    static const char *const unwanted[] = {"dofile", "loadfile", "load", "print", "collectgarbage", "warn"};
    for (size_t i = 0; i < sizeof libraries / sizeof *libraries; i++) {
        luaL_requiref(L, libraries[i].name, libraries[i].func, 1);
        lua_pop(L, 1);
    }
    for (size_t i = 0; i < sizeof unwanted / sizeof *unwanted; i++) {
        lua_pushnil(L);
        lua_setglobal(L, unwanted[i]);
    }
    luaL_newlib(L, primitives);
    int c = lua_gettop(L);
    load_source(L, nmk_jinja_lib_lua, nmk_jinja_lib_lua_end, "=jinja_lib.lua");
    lua_pushvalue(L, c);
    lua_call(L, 1, 1);
    int lib = lua_gettop(L);
    lua_getfield(L, lib, "run");
    job->t->run = luaL_ref(L, LUA_REGISTRYINDEX);
    load_source(L, nmk_jinja_lua, nmk_jinja_lua_end, "=jinja.lua");
    lua_pushvalue(L, c);
    lua_pushvalue(L, lib);
    lua_call(L, 2, 1);
    lua_getfield(L, -1, "compile");
    job->t->compile = luaL_ref(L, LUA_REGISTRYINDEX);
    lua_pushvalue(L, lib);
    lua_setfield(L, LUA_REGISTRYINDEX, "jinja_lib");
    return 0;
}

/* The text to Lua's text, that to a function, and the function called with the library. */
static int compile(lua_State *L) {
    compile_job *job = lua_touserdata(L, 1);
    lua_rawgeti(L, LUA_REGISTRYINDEX, job->t->compile);
    lua_pushlstring(L, job->text, job->bytes);
    lua_call(L, 1, 1);
    size_t n;
    const char *code = lua_tolstring(L, -1, &n);
    if (luaL_loadbufferx(L, code, n, "=" CHUNK, "t")) {
        /* Lua's own limits: "template:LINE: too many local variables ..." */
        int line = 0, at = 0;
        const char *text = lua_tostring(L, -1);
        if (sscanf(text, CHUNK ":%d: %n", &line, &at) != 1 || !at) return lua_error(L);
        lua_newtable(L);
        lua_pushinteger(L, line);
        lua_setfield(L, -2, "line");
        lua_pushfstring(L, "too large for one expression or block (%s)", text + at);
        lua_setfield(L, -2, "message");
        return lua_error(L);
    }
    lua_newtable(L); /* its globals: none */
    lua_setupvalue(L, -2, 1);
    lua_getfield(L, LUA_REGISTRYINDEX, "jinja_lib");
    lua_call(L, 1, 1);
    *job->slot = luaL_ref(L, LUA_REGISTRYINDEX);
    return 0;
}

static int add_template(nmk_template *t, int *slot, const char *text, size_t bytes, const char *name, nmk_err *e) {
    if (*slot != LUA_NOREF) return nmk_fail(e, "%s: the same template twice", name);
    if (bytes > MAX_TEMPLATE_BYTES) return nmk_fail(e, "%s: larger than %d MB", name, MAX_TEMPLATE_BYTES >> 20);
    if (!nmk_utf8_valid(text, bytes)) return nmk_fail(e, "%s: not valid UTF-8", name);
    compile_job job = {.t = t, .text = text, .bytes = bytes, .slot = slot};
    nmk_buf_add(&t->source, text, bytes);
    nmk_buf_puts(&t->source, "\n");
    return protect(t, compile, &job, name, e);
}

/* ---------------------------------------------------------------- loading */

static nmk_template *new_template(const nmk_template_limits *limits, nmk_err *e) {
    nmk_template *t = xcalloc(1, sizeof *t);
    pthread_mutex_init(&t->lock, NULL);
    t->limits = limits ? *limits : default_limits;
    if (!t->limits.memory_bytes) t->limits.memory_bytes = default_limits.memory_bytes;
    if (!t->limits.output_bytes) t->limits.output_bytes = default_limits.output_bytes;
    if (!t->limits.instructions) t->limits.instructions = default_limits.instructions;
    if (!t->limits.time_ns) t->limits.time_ns = default_limits.time_ns;
    t->default_template = t->tool_use = LUA_NOREF;
    compile_job job = {.t = t};
    t->lua = lua_newstate(allocate, t);
    if (!t->lua) {
        nmk_fail(e, "chat template: %zu bytes of memory are not enough", t->limits.memory_bytes);
    } else {
        lua_sethook(t->lua, count, LUA_MASKCOUNT, HOOK_INSTRUCTIONS);
        if (!protect(t, open_state, &job, "chat template", e)) return t;
    }
    nmk_template_free(t);
    return NULL;
}

void nmk_template_free(nmk_template *t) {
    if (!t) return;
    if (t->lua) lua_close(t->lua);
    pthread_mutex_destroy(&t->lock);
    nmk_buf_free(&t->source);
    free(t);
}

const char *nmk_template_source(const nmk_template *t) { return t->source.data; }

int nmk_template_compile(const char *text, size_t bytes, const char *name, const nmk_template_limits *limits,
                         nmk_template **result, nmk_err *e) {
    nmk_template *t = new_template(limits, e);
    if (!t) return -1;
    if (add_template(t, &t->default_template, text, bytes, name, e)) {
        nmk_template_free(t);
        return -1;
    }
    *result = t;
    return 0;
}

static bool exists(const char *path) {
    struct stat st;
    return stat(path, &st) == 0;
}

static int add_file(nmk_template *t, int *slot, const char *path, nmk_err *e) {
    char *text = NULL;
    size_t bytes;
    if (nmk_file_read(&text, &bytes, path, MAX_TEMPLATE_BYTES, e)) return -1;
    int rc = add_template(t, slot, text, bytes, path, e);
    free(text);
    return rc;
}

/* chat_template of tokenizer_config.json: a text, or [{"name": ..., "template": ...}]. */
static int add_config(nmk_template *t, const char *path, nmk_err *e) {
    int rc = -1;
    struct json_object *config = nmk_json_read(path, MAX_CONFIG_BYTES, e);
    char *name = NULL;
    if (!config) goto out;
    struct json_object *field = nmk_json_get(config, "chat_template");
    if (json_object_is_type(field, json_type_string)) {
        name = xasprintf("%s: chat_template", path);
        rc = add_template(t, &t->default_template, json_object_get_string(field),
                          (size_t)json_object_get_string_len(field), name, e);
        goto out;
    }
    if (!json_object_is_type(field, json_type_array)) {
        nmk_fail(e, "%s: no chat_template", path);
        goto out;
    }
    for (size_t i = 0; i < json_object_array_length(field); i++) {
        struct json_object *one = json_object_array_get_idx(field, i);
        struct json_object *label = nmk_json_get(one, "name"), *text = nmk_json_get(one, "template");
        if (!json_object_is_type(label, json_type_string) || !json_object_is_type(text, json_type_string)) {
            nmk_fail(e, "%s: chat_template[%zu]: expected a name and a template", path, i);
            goto out;
        }
        const char *s = json_object_get_string(label);
        int *slot = !strcmp(s, "default") ? &t->default_template : !strcmp(s, "tool_use") ? &t->tool_use : NULL;
        if (!slot) continue; /* rag and the like: no request can ask for them */
        free(name);
        name = xasprintf("%s: chat_template \"%s\"", path, s);
        if (add_template(t, slot, json_object_get_string(text), (size_t)json_object_get_string_len(text), name, e))
            goto out;
    }
    if (t->default_template == LUA_NOREF && t->tool_use == LUA_NOREF)
        nmk_fail(e, "%s: chat_template has none named default", path);
    else
        rc = 0;
out:
    free(name);
    json_object_put(config);
    return rc;
}

int nmk_template_load(const char *path, const nmk_template_limits *limits, nmk_template **result, nmk_err *e) {
    int rc = -1;
    struct stat st;
    nmk_template *t = NULL;
    char *file = xasprintf("%s/chat_template.jinja", path);
    char *tool_use = xasprintf("%s/additional_chat_templates/tool_use.jinja", path);
    char *config = xasprintf("%s/tokenizer_config.json", path);
    if (stat(path, &st)) {
        nmk_fail(e, "cannot read %s: %s", path, strerror(errno));
        goto out;
    }
    if (!(t = new_template(limits, e))) goto out;
    if (!S_ISDIR(st.st_mode)) {
        rc = add_file(t, &t->default_template, path, e);
    } else if (exists(file)) {
        rc = add_file(t, &t->default_template, file, e);
        if (!rc && exists(tool_use)) rc = add_file(t, &t->tool_use, tool_use, e);
    } else if (exists(config)) {
        rc = add_config(t, config, e);
    } else {
        nmk_fail(e, "%s: no chat template: neither chat_template.jinja nor tokenizer_config.json", path);
    }
    if (!rc) *result = t, t = NULL;
out:
    nmk_template_free(t);
    free(file);
    free(tool_use);
    free(config);
    return rc;
}

/* ---------------------------------------------------------------- rendering */

typedef struct {
    nmk_template *t;
    const nmk_template_input *input;
    nmk_buf *out;
} render_job;

static void set_value(lua_State *L, const char *name, struct json_object *value, int none) {
    push_value(L, value, none, 0);
    lua_setfield(L, -2, name);
}

static int render(lua_State *L) {
    render_job *job = lua_touserdata(L, 1);
    nmk_template *t = job->t;
    const nmk_template_input *in = job->input;
    lua_getfield(L, LUA_REGISTRYINDEX, "jinja_lib");
    lua_getfield(L, -1, "none");
    int none = lua_gettop(L);
    bool with_tools = in->tools && t->tool_use != LUA_NOREF;
    int chosen = with_tools || t->default_template == LUA_NOREF ? t->tool_use : t->default_template;

    lua_rawgeti(L, LUA_REGISTRYINDEX, t->run);
    lua_rawgeti(L, LUA_REGISTRYINDEX, chosen);
    lua_newtable(L);
    set_value(L, "tools", in->tools, none);
    set_value(L, "documents", NULL, none);
    lua_pushboolean(L, in->add_generation_prompt);
    lua_setfield(L, -2, "add_generation_prompt");
    if (in->bos_token) lua_pushstring(L, in->bos_token), lua_setfield(L, -2, "bos_token");
    if (in->eos_token) lua_pushstring(L, in->eos_token), lua_setfield(L, -2, "eos_token");
    if (in->kwargs) {
        json_object_object_foreach(in->kwargs, key, value) set_value(L, key, value, none);
    }
    set_value(L, "messages", in->messages, none);
    lua_call(L, 2, 1);

    size_t total = 0;
    lua_Integer pieces = (lua_Integer)lua_rawlen(L, -1);
    for (lua_Integer i = 1; i <= pieces; i++) {
        lua_rawgeti(L, -1, i);
        total += lua_rawlen(L, -1);
        lua_pop(L, 1);
    }
    if (total > t->limits.output_bytes)
        return luaL_error(L, "makes a text of more than %d MB", (int)(t->limits.output_bytes >> 20));
    nmk_buf_reserve(job->out, total + 1);
    for (lua_Integer i = 1; i <= pieces; i++) {
        size_t n;
        lua_rawgeti(L, -1, i);
        const char *s = lua_tolstring(L, -1, &n);
        nmk_buf_add(job->out, s, n);
        lua_pop(L, 1);
    }
    return 0;
}

int nmk_template_render(nmk_template *t, const nmk_template_input *input, nmk_buf *out, nmk_err *e) {
    if (!json_object_is_type(input->messages, json_type_array)) return nmk_fail(e, "messages: expected an array");
    if (input->tools && !json_object_is_type(input->tools, json_type_array))
        return nmk_fail(e, "tools: expected an array");
    if (input->kwargs && !json_object_is_type(input->kwargs, json_type_object))
        return nmk_fail(e, "chat_template_kwargs: expected an object");
    if (nmk_json_get(input->kwargs, "messages") || nmk_json_get(input->kwargs, "tools"))
        return nmk_fail(e, "chat_template_kwargs: messages and tools are not given here");
    pthread_mutex_lock(&t->lock);
    t->now_s = input->now_s;
    render_job job = {.t = t, .input = input, .out = out};
    int rc = protect(t, render, &job, "chat template", e);
    pthread_mutex_unlock(&t->lock);
    return rc;
}
