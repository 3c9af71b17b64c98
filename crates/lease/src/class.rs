use farpool_wire::control;

/// Whether a lease may be taken back early. Leases of both classes end when they are not renewed: if the
/// answer to a request for regions is lost on its way to the owner, the memory must not stay leased for ever.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LeaseClass {
    /// For caches and temporary files: the broker or the node may take the region back after a grace period.
    Revocable,
    /// For transactional data: not taken back. The owner keeps it for as long as it renews the lease.
    Pinned,
}

impl LeaseClass {
    /// The class in a message's field. `None`: unspecified, or a class that this release does not know.
    pub fn from_wire(class: i32) -> Option<Self> {
        match control::LeaseClass::try_from(class).ok()? {
            control::LeaseClass::Unspecified => None,
            control::LeaseClass::Revocable => Some(LeaseClass::Revocable),
            control::LeaseClass::Pinned => Some(LeaseClass::Pinned),
        }
    }

    /// The value for a message's field.
    pub fn to_wire(self) -> i32 {
        match self {
            LeaseClass::Revocable => control::LeaseClass::Revocable as i32,
            LeaseClass::Pinned => control::LeaseClass::Pinned as i32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_survive_the_way_and_unknown_ones_are_none() {
        for class in [LeaseClass::Revocable, LeaseClass::Pinned] {
            assert_eq!(LeaseClass::from_wire(class.to_wire()), Some(class));
        }
        for unknown in [0, 3, -1] {
            assert_eq!(LeaseClass::from_wire(unknown), None);
        }
    }
}
