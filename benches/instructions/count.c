// A plugin of qemu that prints the instructions of the program to standard error when it ends. A block of instructions counts whole each
// time that it is entered. The functions are those of qemu-plugin.h, which the distribution does not install.
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>

struct qemu_plugin_tb;
typedef uint64_t id_of_plugin;
enum { ADD_U64 = 0 };

void qemu_plugin_register_vcpu_tb_trans_cb(id_of_plugin, void (*)(id_of_plugin, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int, void *, uint64_t);
void qemu_plugin_register_atexit_cb(id_of_plugin, void (*)(id_of_plugin, void *), void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

static uint64_t executed;

static void translated(id_of_plugin id, struct qemu_plugin_tb *block)
{
    qemu_plugin_register_vcpu_tb_exec_inline(block, ADD_U64, &executed, qemu_plugin_tb_n_insns(block));
}

static void ended(id_of_plugin id, void *data)
{
    fprintf(stderr, "instructions %" PRIu64 "\n", executed);
}

__attribute__((visibility("default"))) int qemu_plugin_install(id_of_plugin id, const void *info, int argc, char **argv)
{
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, ended, 0);
    return 0;
}
