"""An environment for TRL's `GRPOTrainer(environment_factory=Multiplication)`: two tools and a reward."""


class Multiplication:
    """Asks for a product. The model may multiply by a tool before it submits one."""

    def reset(self, answer, **columns):
        """Begin an episode of the row with the column `answer`; the prompt of the row is the question."""
        self.answer = int(answer)
        self.submitted = None

    def multiply(self, a: int, b: int) -> int:
        """
        Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.

        Returns:
            The product.
        """
        return a * b

    def submit(self, product: int) -> str:
        """
        Submit the result. Only the first submission counts.

        Args:
            product: The product that was asked for.
        """
        if self.submitted is None:
            self.submitted = product
        return "noted"

    def get_reward(self) -> float:
        """Return 1 if the product was submitted, else 0."""
        return float(self.submitted == self.answer)
