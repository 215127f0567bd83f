// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
/*
 * The generation id of a machine: 16 bytes that are others after a restore from a snapshot, and an interrupt that
 * says so. Announced by nacelle_genid=ADDRESS:IRQ on the command line (docs/devices/genid.md). The kernel's own
 * vmgenid driver does the same with ACPI or a device tree, which these machines do not have.
 */
#include <linux/init.h>
#include <linux/interrupt.h>
#include <linux/io.h>
#include <linux/kernel.h>
#include <linux/random.h>
#include <linux/string.h>

#define ID_BYTES 16

static phys_addr_t address __initdata;
static unsigned int irq __initdata;
static void __iomem *window;
static u8 current_id[ID_BYTES];

static int __init announced(char *text)
{
	char *rest;

	address = memparse(text, &rest);
	if (*rest != ':' || kstrtouint(rest + 1, 0, &irq)) {
		pr_err("nacelle_genid: not ADDRESS:IRQ: %s\n", text);
		address = 0;
	}
	return 1;
}
__setup("nacelle_genid=", announced);

/*
 * In the interrupt itself, so that no process of the interrupted processor runs on the old state. The notifiers
 * that add_vmfork_randomness() calls may sleep, but only WireGuard has one, and it is not in this kernel.
 */
static irqreturn_t changed(int number, void *unused)
{
	u8 id[ID_BYTES];

	memcpy_fromio(id, window, sizeof(id));
	if (memcmp(id, current_id, sizeof(id))) {
		memcpy(current_id, id, sizeof(id));
		add_vmfork_randomness(id, sizeof(id));
	}
	return IRQ_HANDLED;
}

static int __init genid_init(void)
{
	int error;

	if (!address)
		return 0;
	window = ioremap(address, ID_BYTES);
	if (!window)
		return -ENOMEM;
	memcpy_fromio(current_id, window, sizeof(current_id));
	add_device_randomness(current_id, sizeof(current_id));
	error = request_irq(irq, changed, 0, "nacelle-genid", NULL);
	if (error) {
		pr_err("nacelle_genid: no interrupt %u: %d\n", irq, error);
		iounmap(window);
	}
	return error;
}
device_initcall(genid_init);
