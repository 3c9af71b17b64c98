/// Names this host by its kernel's boot id: equal for all processes that can share memory, and for no others.
/// Empty where the kernel does not tell; then nobody counts as being on the same host.
pub fn this_host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// The name of this host.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
