/* config.json against what the program was generated for; generation_config.json. */
#include "config.h"

#include <math.h>

#include "weights_helper.h"

static const nmk_config facts[] = {
    {"model_type", NULL, "\"tiny\"", 1},
    {"hidden_size", NULL, "256", 1},
    {"rope_theta", "rope_parameters.rope_theta", "50000.0", 1},
    {"rms_norm_eps", NULL, "1e-06", 1},
    {"norm_topk_prob", NULL, "false", 1},
    {"attention_bias", NULL, "false", 0},
    {"layer_types", NULL, "[\"full\",\"sliding\",\"full\"]", 0},
    {"rope_parameters.rope_type", "rope_scaling.rope_type|rope_scaling.type", "\"yarn\"", 0},
};
enum { FACTS = sizeof facts / sizeof *facts };

#define GOOD \
    "\"model_type\":\"tiny\",\"hidden_size\":256,\"rope_theta\":50000,\"rms_norm_eps\":0.000001,\"norm_topk_prob\":false"

static void config(const char *text) { write_file("config.json", text, strlen(text)); }

static void accept(const char *name, const char *text) {
    nmk_err e = {""};
    config(text);
    check(nmk_config_check(test_dir, facts, FACTS, &e) == 0, name, "%s", e.text);
}

static void refuse(const char *name, const char *text, const char *expected) {
    nmk_err e = {""};
    config(text);
    check_refused(name, nmk_config_check(test_dir, facts, FACTS, &e), &e, expected);
}

static void generation(const char *text) {
    if (text) write_file("generation_config.json", text, strlen(text));
}

static void refuse_generation(const char *name, const char *text, const char *expected) {
    nmk_err e = {""};
    nmk_generation_config g;
    generation(text);
    check_refused(name, nmk_generation_config_read(test_dir, &g, &e), &e, expected);
}

int main(void) {
    nmk_err e = {""};
    nmk_generation_config g;
    make_dir();

    check_refused("no config.json", nmk_config_check(test_dir, facts, FACTS, &e), &e,
                  "DIR/config.json: No such file or directory");
    accept("agreement", "{" GOOD "}");
    accept("null counts as absent", "{" GOOD ",\"attention_bias\":null}");
    accept(
        "the other place of a fact",
        "{\"model_type\":\"tiny\",\"hidden_size\":256,\"rope_parameters\":{\"rope_theta\":5e4},\"rms_norm_eps\":1e-6,\"norm_topk_prob\":false}");
    accept("the first of several other places", "{" GOOD ",\"rope_scaling\":{\"rope_type\":\"yarn\",\"type\":7}}");
    accept("the last of several other places", "{" GOOD ",\"rope_scaling\":{\"type\":\"yarn\"}}");
    refuse("another value at the last of several places", "{" GOOD ",\"rope_scaling\":{\"type\":\"dynamic\"}}",
           "DIR/config.json: rope_scaling.type is \"dynamic\", this program was generated for \"yarn\"");
    accept("a list that agrees", "{" GOOD ",\"layer_types\":[\"full\",\"sliding\",\"full\"]}");
    refuse(
        "contradictions",
        "{\"model_type\":\"tiny\",\"hidden_size\":512,\"rope_theta\":10000.0,\"norm_topk_prob\":true,\"attention_bias\":true}",
        "DIR/config.json: hidden_size is 512, this program was generated for 256\n"
        "DIR/config.json: rope_theta is 10000.0, this program was generated for 50000.0\n"
        "DIR/config.json: rms_norm_eps is missing, this program was generated for 1e-06\n"
        "DIR/config.json: norm_topk_prob is true, this program was generated for false\n"
        "DIR/config.json: attention_bias is true, this program was generated for false");
    refuse(
        "a number in quotes",
        "{\"model_type\":\"tiny\",\"hidden_size\":\"256\",\"rope_theta\":50000,\"rms_norm_eps\":1e-6,\"norm_topk_prob\":false}",
        "DIR/config.json: hidden_size is \"256\", this program was generated for 256");
    refuse(
        "the other place contradicts",
        "{\"model_type\":\"tiny\",\"hidden_size\":256,\"rope_parameters\":{\"rope_theta\":1},\"rms_norm_eps\":1e-6,\"norm_topk_prob\":false}",
        "DIR/config.json: rope_parameters.rope_theta is 1, this program was generated for 50000.0");
    refuse("a list of another length", "{" GOOD ",\"layer_types\":[\"full\"]}",
           "DIR/config.json: layer_types has 1 elements, this program was generated for 3");
    refuse("a list that differs", "{" GOOD ",\"layer_types\":[\"full\",\"full\",\"full\"]}",
           "DIR/config.json: layer_types[1] is \"full\", this program was generated for \"sliding\"");
    refuse("a key twice", "{" GOOD ",\n\"hidden_size\":256}",
           "DIR/config.json: line 2, column 1: the key \"hidden_size\" is there twice");
    refuse("not an object", "[1]", "DIR/config.json: not a JSON object");
    refuse("cut short", "{\"model_type\":\"tiny\"", "DIR/config.json: line 1, column 21: expected ',' or '}'");

    config("{\"eos_token_id\":7,\"bos_token_id\":3}");
    check(nmk_generation_config_read(test_dir, &g, &e) == 0 && g.eos_count == 1 && g.eos[0] == 7 && g.bos == 3 &&
              g.temperature == 1 && g.top_p == 1 && g.top_k == 0 && !g.do_sample,
          "without generation_config.json", "%s", e.text);
    generation("{\"eos_token_id\":[4,2],\"do_sample\":true,\"temperature\":0.5,\"top_p\":0.95,\"top_k\":40}");
    check(nmk_generation_config_read(test_dir, &g, &e) == 0 && g.eos_count == 2 && g.eos[0] == 4 && g.eos[1] == 2 &&
              g.bos == 3 && g.do_sample && g.temperature == 0.5 && fabs(g.top_p - 0.95) < 1e-9 && g.top_k == 40,
          "generation_config.json", "%s", e.text);
    refuse_generation("an eos that is no id", "{\"eos_token_id\":[4,\"x\"]}",
                      "DIR/generation_config.json: eos_token_id: \"x\" is not a token id");
    refuse_generation("a temperature out of range", "{\"temperature\":-1}",
                      "DIR/generation_config.json: temperature is -1, expected a number from 0 to 100");
    refuse_generation("too many eos ids", "{\"eos_token_id\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}",
                      "DIR/generation_config.json: eos_token_id has 17 ids, at most 16 are supported");

    int rc = nmk_config_check("examples/nmc-toy", nmk_configs, nmk_config_count, &e);
    check(rc == 0, "the toy's config.json agrees with its spec", "%s", e.text);
    rc = nmk_generation_config_read("examples/nmc-toy", &g, &e);
    check(rc == 0 && g.eos_count == 2 && g.eos[0] == 4 && g.eos[1] == 2 && g.bos == 1 && g.do_sample &&
              fabs(g.top_p - 0.95) < 1e-9,
          "the toy's generation_config.json", "%s", e.text);
    clear_dir();
    rmdir(test_dir);
    return failures != 0;
}
