/// The boot id of this host's kernel. Two processes have the same id if and only if they can share memory.
/// Empty if the kernel does not provide it; then no process counts as being on the same host.
pub fn this_host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// The name of this host.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
