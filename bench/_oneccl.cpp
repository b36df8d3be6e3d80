// The little of oneCCL that the bench needs, with C names, for ctypes: join, all-reduce, barrier.
//
// Built by _oneccl.py against the wheel. One communicator per process. Every function returns 0, or
// -1 with the reason in oneccl_error().

#include <oneapi/ccl.hpp>

#include <cstdio>
#include <cstring>
#include <memory>

namespace
{

ccl::shared_ptr_class<ccl::kvs> store;
std::unique_ptr<ccl::communicator> world;
char error_text[256];

template <class Body> int guarded(Body body)
{
    try {
        body();
        return 0;
    } catch (const std::exception &error) {
        std::snprintf(error_text, sizeof error_text, "%s", error.what());
        return -1;
    }
}

} // namespace

extern "C" {

const char *oneccl_error(void)
{
    return error_text;
}

// Rank 0 makes the store that the ranks meet in; `address` takes its 256 bytes.
int oneccl_make_store(char *address)
{
    return guarded([&] {
        ccl::init();
        store = ccl::create_main_kvs();
        const auto made = store->get_address();
        std::memcpy(address, made.data(), made.size());
    });
}

// Join the ranks; those other than 0 find the store by the address that rank 0 was given.
int oneccl_join(int size, int rank, const char *address)
{
    return guarded([&] {
        if (!store) {
            ccl::init();
            ccl::kvs::address_type where;
            std::memcpy(where.data(), address, where.size());
            store = ccl::create_kvs(where);
        }
        world = std::make_unique<ccl::communicator>(ccl::create_communicator(size, rank, store));
    });
}

// In place; `dtype` and `op` are ccl::datatype and ccl::reduction by number.
int oneccl_allreduce(void *values, size_t count, int dtype, int op)
{
    return guarded([&] {
        ccl::allreduce(values, values, count, static_cast<ccl::datatype>(dtype),
                       static_cast<ccl::reduction>(op), *world)
            .wait();
    });
}

int oneccl_barrier(void)
{
    return guarded([] { ccl::barrier(*world).wait(); });
}

int oneccl_leave(void)
{
    return guarded([] {
        world.reset();
        store.reset();
    });
}
}
