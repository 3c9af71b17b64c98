//! Messages of the `verbs` transport in addition to the frames of [`crate::frame`]. `docs/src/verbs.md` has
//! the tables.

use crate::frame::{Decoded, FrameError, HELLO_BYTES, HelloReply};

/// Length of a [`VerbsWelcome`].
pub const VERBS_WELCOME_BYTES: usize = HELLO_BYTES + 8;
/// Length of a [`VerbsAttached`].
pub const VERBS_ATTACHED_BYTES: usize = 24;

/// The node's answer to a connection request, in the private data of its acceptance.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VerbsWelcome {
    /// The same as over every other transport.
    pub reply: HelloReply,
    /// Atomics are sent as messages, and the node's processor carries them out. This is set if one of the
    /// cards supports no atomics, or if other paths to the memory use the processor's atomics.
    pub atomics_by_message: bool,
}

impl VerbsWelcome {
    /// The answer as sent.
    pub fn encode(&self) -> [u8; VERBS_WELCOME_BYTES] {
        let mut bytes = [0; VERBS_WELCOME_BYTES];
        bytes[..HELLO_BYTES].copy_from_slice(&self.reply.encode());
        bytes[HELLO_BYTES] = self.atomics_by_message as u8;
        bytes
    }

    /// Reads the answer. Private data arrives with padding, so bytes after the answer are ignored.
    pub fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let Decoded::Complete(reply) = HelloReply::decode(bytes)? else { return Err(FrameError::Malformed) };
        let options = bytes.get(HELLO_BYTES..VERBS_WELCOME_BYTES).ok_or(FrameError::Malformed)?;
        if options[0] > 1 || options[1..] != [0; 7] {
            return Err(FrameError::Malformed);
        }
        Ok(VerbsWelcome { reply, atomics_by_message: options[0] == 1 })
    }
}

/// Payload of the answer to `Attach`: where the client's card finds the region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VerbsAttached {
    /// Address of the region's first byte, as the node's card knows it.
    pub address: u64,
    /// Size of the region.
    pub region_bytes: u64,
    /// The card's key to the region, valid on this connection until the region is detached or fenced.
    pub remote_key: u32,
    /// Whether the grant allows writes and atomics.
    pub writable: bool,
}

impl VerbsAttached {
    /// The payload as sent.
    pub fn encode(&self) -> [u8; VERBS_ATTACHED_BYTES] {
        let mut bytes = [0; VERBS_ATTACHED_BYTES];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.region_bytes.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.remote_key.to_le_bytes());
        bytes[20] = self.writable as u8;
        bytes
    }

    /// Reads the payload. The range lies within the address space.
    pub fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let bytes: &[u8; VERBS_ATTACHED_BYTES] = bytes.try_into().map_err(|_| FrameError::Malformed)?;
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let (address, region_bytes) = (word(0), word(8));
        if bytes[20] > 1 || bytes[21..] != [0; 3] || address.checked_add(region_bytes).is_none() {
            return Err(FrameError::Malformed);
        }
        let remote_key = u32::from_le_bytes(bytes[16..20].try_into().expect("four bytes"));
        Ok(VerbsAttached { address, region_bytes, remote_key, writable: bytes[20] == 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Incarnation, NodeId};
    use proptest::prelude::*;

    #[test]
    fn layout_of_the_attachment_is_fixed() {
        let attached = VerbsAttached {
            address: 0x7f00_0000_1000,
            region_bytes: 64 << 20,
            remote_key: 0x0102,
            writable: true,
        };
        #[rustfmt::skip]
        let golden = [
            0, 0x10, 0, 0, 0, 0x7f, 0, 0,   0, 0, 0, 4, 0, 0, 0, 0,
            2, 1, 0, 0,                     1, 0, 0, 0,
        ];
        assert_eq!(attached.encode(), golden);
        assert_eq!(VerbsAttached::decode(&golden), Ok(attached));
        assert_eq!(VerbsAttached::decode(&golden[1..]), Err(FrameError::Malformed));
    }

    #[test]
    fn layout_of_the_welcome_is_fixed_and_padding_is_ignored() {
        let reply =
            HelloReply { node: NodeId(1), incarnation: Incarnation(2), region_bytes: 64 << 20, regions: 3 };
        let welcome = VerbsWelcome { reply, atomics_by_message: true };
        let mut padded = [0; 196];
        padded[..HELLO_BYTES].copy_from_slice(&reply.encode());
        padded[HELLO_BYTES] = 1;
        assert_eq!(welcome.encode(), padded[..VERBS_WELCOME_BYTES]);
        assert_eq!(VerbsWelcome::decode(&padded), Ok(welcome));
        assert_eq!(VerbsWelcome::decode(&padded[..VERBS_WELCOME_BYTES - 1]), Err(FrameError::Malformed));
    }

    #[test]
    fn a_region_past_the_end_of_the_address_space_is_malformed() {
        let attached = VerbsAttached { address: u64::MAX, region_bytes: 2, remote_key: 0, writable: false };
        assert_eq!(VerbsAttached::decode(&attached.encode()), Err(FrameError::Malformed));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_a_value_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = VerbsWelcome::decode(&bytes);
            let _ = VerbsAttached::decode(&bytes);
        }
    }
}
