//! How a process registers an open file of a mount, in order to work on it directly: two ioctls on its
//! descriptor.

/// Registers the open file. The answer, a [`Registered`], says which mount and file it is.
pub const REGISTER: u32 = ioc(IOC_READ, 1, Registered::BYTES as u32);
/// Ends the direct work on this open file, for good. Answered once no operation is in progress.
pub const UNREGISTER: u32 = ioc(IOC_NONE, 2, 0);

/// Version of everything that the daemon and direct clients (guests) share: the words, the table, the layout,
/// the messages. Any change to these raises it.
pub const GUEST_VERSION: u32 = 4;
/// Bytes of a ticket.
pub const TICKET_BYTES: usize = 32;

// The kernel's composition of ioctl numbers on x86 and ARM: direction, size, type, number.
const IOC_NONE: u32 = 0;
const IOC_READ: u32 = 2;
const TYPE: u32 = 0xFA;

const fn ioc(direction: u32, number: u32, bytes: u32) -> u32 {
    direction << 30 | bytes << 16 | TYPE << 8 | number
}

/// What a process needs in order to continue at the daemon's socket.
///
/// ```text
/// 0  version u32   4  zero u32   8  inode u64   16  ticket 32 bytes   48  socket's name, 64 bytes, padded with zeros
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Registered {
    /// [`GUEST_VERSION`] of the daemon.
    pub version: u32,
    /// The file's inode number.
    pub inode: u64,
    /// Gives access to the file's layout; good for one use.
    pub ticket: [u8; TICKET_BYTES],
    /// The daemon's socket, in the abstract namespace.
    pub socket: String,
}

impl Registered {
    /// Length of the answer.
    pub const BYTES: usize = 112;
    /// Longest name of a socket.
    pub const MAX_SOCKET_BYTES: usize = 64;

    /// The answer as the ioctl returns it. A name that is too long is cut off.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.version.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.inode.to_le_bytes());
        bytes[16..48].copy_from_slice(&self.ticket);
        let name = self.socket.as_bytes();
        let length = name.len().min(Self::MAX_SOCKET_BYTES);
        bytes[48..48 + length].copy_from_slice(&name[..length]);
        bytes
    }

    /// Reads the answer; `None` if a daemon cannot have sent it.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let name = bytes[48..].split(|&byte| byte == 0).next()?;
        let socket = std::str::from_utf8(name).ok().filter(|name| !name.is_empty())?.to_owned();
        Some(Registered {
            version: u32::from_le_bytes(bytes[..4].try_into().ok()?),
            inode: u64::from_le_bytes(bytes[8..16].try_into().ok()?),
            ticket: bytes[16..48].try_into().ok()?,
            socket,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_numbers_of_the_ioctls_are_fixed() {
        assert_eq!((REGISTER, UNREGISTER), (0x8070_FA01, 0x0000_FA02));
    }

    proptest! {
        #[test]
        fn an_answer_is_read_as_it_was_written(inode: u64, ticket: [u8; TICKET_BYTES], socket in "[a-z0-9-]{1,64}") {
            let registered = Registered { version: GUEST_VERSION, inode, ticket, socket };
            prop_assert_eq!(Registered::decode(&registered.encode()), Some(registered));
        }

        #[test]
        fn any_bytes_decode_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), Registered::BYTES)) {
            let _ = Registered::decode(&bytes.try_into().unwrap());
        }
    }
}
