/* crc32c.h - the checksum of every frame: CRC-32C (Castagnoli), as in iSCSI and ext4. */
#ifndef RINGCOMM_CRC32C_H
#define RINGCOMM_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Extends crc, the checksum of the bytes before (0 at first), by n bytes: crc32c(0, "123456789", 9)
 * == 0xe3069283. Uses the CPU's instructions where it has them. */
uint32_t crc32c(uint32_t crc, const void *data, size_t n);

/* For tests and benchmarks: the number of methods that this CPU has, and the checksum by one of
 * them. Method 0 uses tables alone; the last one is what crc32c uses. */
int crc32c_methods(void);
uint32_t crc32c_by(int method, uint32_t crc, const void *data, size_t n);

#endif
