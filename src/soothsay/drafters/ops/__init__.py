"""Operations of drafters that depend on a device or an instruction set, in stock and native form."""
